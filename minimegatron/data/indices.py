"""Which tokens make sample k: document, sample and shuffle index, epoch after epoch, computed once for all ranks.

Training wants samples of exactly `s + 1` tokens (`s` inputs, and the same shifted by one as labels), in random order,
from documents of any length, for any number of epochs, and sample k without reading the k before it. Three arrays
give that. Let P be the number of documents of the split, e the number of epochs, T the tokens of one epoch:

| array            | shape      | meaning                                                                              |
|------------------|------------|--------------------------------------------------------------------------------------|
| `document_index` | [e * P]    | the documents, e times each, shuffled: in this order they are a stream of e*T tokens |
| `sample_index`   | [n + 1, 2] | row i: where token i*s of the stream is, as (position in `document_index`, offset)   |
| `shuffle_index`  | [n]        | a permutation of 0..n-1, n = (e*T - 1) // s                                          |

Sample k is the stream from row i to row i+1, both included, with i = shuffle_index[k]: neighbours share one token,
which is the last label of one and the first input of the next. e is the smallest number with e*T >= num_samples*s + 1.

The last epoch may be needed only in part. If less than 80 % of it is, its documents and samples are shuffled by
themselves and come last: otherwise the documents that happen to fall into the unused part would be seen less often.

Megatron builds the sample index with a walk in C++; but a document has as many rows as multiples of s lie between its
first token and the next document's, so one `repeat` does it. The arrays are equal to Megatron's, element by element
(`build_sample_indices`; numpy's `RandomState`, whose stream is frozen).

**Epoch after epoch** (`Epochs`). Megatron's arrays are a function of how many samples a run wants, so a run that is
made longer after it has trained would repeat samples and skip others. Here the order of an epoch is drawn from the seed
and its number alone, and its arrays are made when its first sample is read:

    stream     | documents of epoch 0, shuffled | documents of epoch 1, shuffled | ...             T tokens each
    samples    |  0 |  1 | ...              | B(1) |  ...                    | B(2) |              s tokens each
    B(e) = (e T - 1) // s                       samples that end before epoch e does; the others of epoch e are a block

A *block* holds samples B(e) to B(e+1), shuffled. Its first one may begin in the epoch before, or, where documents are
few, in many epochs before; so the block's documents begin with what is left of those.

| block | drawn by                    | arrays                                                                        |
|-------|-----------------------------|-------------------------------------------------------------------------------|
| 0     | `RandomState(seed)`         | Megatron's for one epoch, element by element                                  |
| e > 0 | `RandomState([seed, e])`    | ours: Megatron shuffles all epochs of a run together                          |

With `joint` samples, block 0 is as many epochs as they take, in Megatron's order of exactly so many samples: for runs
that began with that order (Megatron's, or of an older version). What follows is epoch by epoch. Two blocks are in
memory at a time, so thousands of epochs of a few documents need no more than one.

**Kept in files** (`cached_arrays`). The folder's name is the SHA-256 of all that the arrays depend on, so other data,
another seed or another length have another name. One process builds, the others wait. A manifest holds sizes and
hashes; a cache that differs from it is built again.

In Megatron-LM: `_build_document_index`, `_build_shuffle_index` in `megatron/core/datasets/gpt_dataset.py`, and
`build_sample_idx` in `helpers.cpp`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from minimegatron.bars import tqdm
from minimegatron.data.publish import build_once, publish, read_json, sha256_of, to_json
from minimegatron.errors import DataError

SEPARATE_BELOW = 0.80


class SampleIndices(NamedTuple):
    """The three arrays of this module (int32; int64 or uint32 where Megatron has them)."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def count_epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int) -> int:
    """How often the documents are read to give `num_samples` (None: once)."""
    needed = 1 if num_samples is None else num_samples * sequence_length + 1
    return max(1, -(-needed // tokens_per_epoch))


def count_samples(tokens_per_epoch: int, epochs: int, sequence_length: int) -> int:
    """Samples that end in the first `epochs` epochs."""
    return max(0, epochs * tokens_per_epoch - 1) // sequence_length


def no_token(documents: int) -> DataError:
    """The error for a split that is empty, or whose documents are."""
    return DataError(f"{documents} documents with no token", fix="give this split a larger share of --split")


def too_few(tokens: int, sequence_length: int) -> DataError:
    """The error for data that is read once and is too short for a sample."""
    return DataError(
        f"{tokens} tokens make no sample of {sequence_length} + 1",
        fix="more data, a larger share of --split, or a shorter --seq-length",
    )


def build_sample_indices(
    sequence_lengths: np.ndarray,
    documents: np.ndarray,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    progress: bool = False,
) -> SampleIndices:
    """The three arrays for one split.

    Args:
        sequence_lengths: [S] tokens of every sequence of the dataset.
        documents: [P] the sequences of this split ("documents", as each usually is one).
        num_samples: at least this many samples; None for one epoch.
        sequence_length: s.
        seed: seed of both shuffles.
        progress: show a bar on stderr, if it takes long.

    Raises:
        DataError: the split has no token, or fewer than s + 1 in the one epoch asked for.
    """
    tokens_per_epoch = int(sequence_lengths[documents].sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise no_token(len(documents))
    epochs = count_epochs(tokens_per_epoch, num_samples, sequence_length)
    samples = count_samples(tokens_per_epoch, epochs, sequence_length)
    if samples == 0:
        raise too_few(tokens_per_epoch, sequence_length)
    before_last = count_samples(tokens_per_epoch, epochs - 1, sequence_length)
    separate = (
        epochs > 1
        and num_samples is not None
        and (num_samples - before_last < int(SEPARATE_BELOW * ((tokens_per_epoch - 1) // sequence_length)))
    )
    rng = np.random.RandomState(seed)
    bar = progress_bar(epochs * len(documents) + 2 * samples, "index", progress)
    if separate:
        first, last = shuffled(np.tile(documents, epochs - 1), rng), shuffled(documents, rng)
        document_index = np.concatenate((first, last))
    else:
        document_index = shuffled(np.tile(documents, epochs), rng)
    bar.update(len(document_index))
    sample_index = locate(sequence_lengths[document_index], samples, sequence_length)
    bar.update(samples)
    shuffle_index = numbered(samples)
    boundary = before_last if separate else samples
    rng.shuffle(shuffle_index[:boundary])
    if separate:
        rng.shuffle(shuffle_index[boundary:])
    bar.close()
    return SampleIndices(document_index, sample_index, shuffle_index)


def shuffled(documents: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """A copy in another order, int32."""
    copy = documents.astype(np.int32)
    rng.shuffle(copy)
    return copy


def numbered(samples: int) -> np.ndarray:
    """0, 1, 2 ... in Megatron's dtype for that many samples."""
    return np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)


def locate(lengths: np.ndarray, samples: int, sequence_length: int, begin: int = 0) -> np.ndarray:
    """[samples + 1, 2]: document position and offset of token `begin` + i * s of the stream of documents.

    Args:
        lengths: lengths of the documents, in their order.
        samples: how many begin here and end in the stream.
        sequence_length: s.
        begin: a token of the first document.
    """
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    starts[1:] -= begin
    rows = np.diff(-(-starts // sequence_length))  # how many multiples of s lie in each document
    starts[0] = -begin
    largest = max(len(lengths), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    index = np.empty((samples + 1, 2), dtype)
    index[:, 0] = np.repeat(np.arange(len(lengths), dtype=dtype), rows)
    index[:, 1] = np.arange(0, samples * sequence_length + 1, sequence_length) - np.repeat(starts[:-1], rows)
    index[0] = 0, begin  # the walk begins at the first document even when that one is empty
    return index


# ---------------------------------------------------------------------------------------------------- epoch after epoch

BLOCKS_IN_MEMORY = 2  # a batch may lie in two of them

Keep = Callable[[int, Callable[[], SampleIndices]], SampleIndices]


class Epochs:
    """The arrays of every block of one split.

    Args:
        lengths: [S] tokens of every sequence of the dataset.
        documents: [P] the sequences of this split.
        sequence_length: s.
        seed: seed of all shuffles.
        joint: samples whose epochs are shuffled together; None: each epoch by itself.
        keep: called with the first epoch of a block and the function that builds it; returns the block, built or
            cached.
        progress: show a bar if that takes long.

    Attributes:
        tokens: T, the tokens of one epoch.
        first: epochs of block 0.

    Raises:
        DataError: there is no token.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        documents: np.ndarray,
        sequence_length: int,
        seed: int,
        joint: int | None = None,
        keep: Keep = lambda epoch, build: build(),
        progress: bool = False,
    ) -> None:
        self.lengths, self.documents, self.s, self.seed, self.joint = lengths, documents, sequence_length, seed, joint
        self.tokens = int(lengths[documents].sum(dtype=np.int64))
        self._keep, self._progress = keep, progress
        self._blocks: dict[int, SampleIndices] = {}
        if self.tokens == 0:
            raise no_token(len(documents))
        self.first = count_epochs(self.tokens, joint, sequence_length)

    def samples(self, epochs: int) -> int:
        """B(epochs): how many samples end in the first `epochs` epochs."""
        return count_samples(self.tokens, epochs, self.s)

    def epoch_of(self, k: int) -> int:
        """The epoch of sample k of the order; for epochs that are shuffled together the first."""
        epoch = count_epochs(self.tokens, k + 1, self.s) - 1
        return 0 if epoch < self.first else epoch

    def find(self, k: int) -> tuple[SampleIndices, int]:
        """The block of sample k, and the sample's number in the block's stream."""
        epoch = self.epoch_of(k)
        block = self.block(epoch)
        return block, int(block.shuffle_index[k - (self.samples(epoch) if epoch else 0)])

    def block(self, epoch: int) -> SampleIndices:
        """The arrays of a block, by its first epoch."""
        if epoch not in self._blocks:
            found = self._keep(epoch, self._build_first if epoch == 0 else lambda: self._build(epoch))
            newest = list(self._blocks.items())[1 - BLOCKS_IN_MEMORY :]
            self._blocks = dict([*newest, (epoch, found)])
        return self._blocks[epoch]

    def _build_first(self) -> SampleIndices:
        if self.samples(self.first):
            return build_sample_indices(self.lengths, self.documents, self.joint, self.s, self.seed, self._progress)
        return SampleIndices(self._shuffled(0)[0], np.zeros((1, 2), np.int32), numbered(0))

    def _build(self, epoch: int) -> SampleIndices:
        before, samples = self.samples(epoch), self.samples(epoch + 1) - self.samples(epoch)
        own, rng = self._shuffled(epoch)
        rest, offset = self._rest(before * self.s, epoch)
        documents = np.concatenate((rest, own))
        sample_index = locate(self.lengths[documents], samples, self.s, offset)
        shuffle_index = numbered(samples)
        rng.shuffle(shuffle_index)
        return SampleIndices(documents, sample_index, shuffle_index)

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.random.RandomState]:
        """The documents of an epoch, and the generator after shuffling them."""
        rng = np.random.RandomState([self.seed, epoch] if epoch else self.seed)
        return shuffled(self.documents, rng), rng

    def _rest(self, token: int, epoch: int) -> tuple[np.ndarray, int]:
        """The documents from the one with `token` of the stream up to `epoch`, and the token's offset in it."""
        at = token // self.tokens
        begin, pieces = at * self.tokens, list[np.ndarray]()
        if at < self.first:
            at, begin, pieces = self.first, 0, [self.block(0).document_index]
        documents = np.concatenate([*pieces, *(self._shuffled(one)[0] for one in range(at, epoch))])
        ends = np.cumsum(self.lengths[documents], dtype=np.int64)
        skipped = int(np.searchsorted(ends, token - begin, side="right"))
        return documents[skipped:], token - begin - (int(ends[skipped - 1]) if skipped else 0)


# -------------------------------------------------------------------------------------------------------- kept in files

HASH_BELOW_BYTES = 1 << 30


def cached_arrays(
    folder: str, description: Mapping[str, Any], build: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of `build()`, or those that an earlier call with the same description saved; memory-mapped and
    read-only.

    Args:
        folder: folder of caches.
        description: everything the arrays depend on, JSON-serialisable.
        build: computes the arrays by name.

    Raises:
        DataError: the folder cannot be written to.
        DeadlineError: another process has been building for ten minutes.
    """
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
    home = os.path.join(folder, key)

    def save(stage: str) -> None:
        files = {}
        for name, array in build().items():
            path = os.path.join(stage, f"{name}.npy")
            np.save(path, array, allow_pickle=False)
            files[name] = {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
        manifest = to_json({"description": dict(description), "files": files})
        publish(os.path.join(stage, "manifest.json"), manifest)

    build_once(home, save, _is_intact)
    names = read_json(os.path.join(home, "manifest.json"))["files"]
    load = {name: np.load(os.path.join(home, f"{name}.npy"), mmap_mode="r", allow_pickle=False) for name in names}
    return {name: array.view(np.ndarray) for name, array in load.items()}


def _is_intact(home: str) -> bool:
    """Whether a cache matches its manifest: sizes always, hashes of files below 1 GiB."""
    if not os.path.isdir(home):
        return False
    try:
        for name, entry in read_json(os.path.join(home, "manifest.json"))["files"].items():
            path = os.path.join(home, f"{name}.npy")
            size = os.path.getsize(path)
            if size != entry["bytes"] or (size < HASH_BELOW_BYTES and sha256_of(path) != entry["sha256"]):
                raise DataError("size or SHA-256 differs from the manifest", where=path)
    except (OSError, DataError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"the index cache {home} is damaged and built again: {error}", stacklevel=2)
        return False
    return True


def progress_bar(total: int, what: str, shown: bool) -> tqdm:
    """A bar on stderr, visible once the work has taken two seconds; `update` it, then `close` it.

    Args:
        total: amount of work.
        what: the work, in a word.
        shown: show it, on one rank of many. If stderr is no terminal, a line every half minute.
    """
    pause = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(total=total, desc=what, unit_scale=True, delay=2.0, mininterval=pause, leave=False, disable=not shown)
