"""Which tokens make sample k: the document index, the sample index and the shuffle index.

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

All of it is one function of (lengths, num_samples, s, seed), by numpy's `RandomState`, whose stream is frozen: of
several epochs, another one for another length of the run. So a run here asks for the arrays of one epoch, and for
those that follow one at a time (`epochs`).

Megatron builds the sample index with a walk in C++; but a document has as many rows as multiples of s lie between its
first token and the next document's, so one `repeat` does it.

In Megatron-LM: `_build_document_index`, `_build_shuffle_index` in `megatron/core/datasets/gpt_dataset.py`, and
`build_sample_idx` in `helpers.cpp`. The arrays are equal to Megatron's, element by element.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minimegatron.data.long_work import long_work
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
    """For a split that is empty, or whose documents are."""
    return DataError(f"{documents} documents with no token", fix="give this split a larger share of --split")


def too_few(tokens: int, sequence_length: int) -> DataError:
    """For data that is read once and makes no sample."""
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
        num_samples: at least so many samples; None for one epoch.
        sequence_length: s.
        seed: of both shuffles.
        progress: a bar on stderr, if it takes long.

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
    bar = long_work(epochs * len(documents) + 2 * samples, "index", progress)
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
    """0, 1, 2 ... in the dtype that Megatron has for it."""
    return np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)


def locate(lengths: np.ndarray, samples: int, sequence_length: int, begin: int = 0) -> np.ndarray:
    """[samples + 1, 2]: document position and offset of token `begin` + i * s of the stream of documents.

    Args:
        lengths: of the documents, in their order.
        samples: how many begin here and end in the stream.
        sequence_length: s.
        begin: a token of the first document.
    """
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    starts[1:] -= begin
    here = np.diff(-(-starts // sequence_length))  # how many multiples of s lie in each document
    starts[0] = -begin
    largest = max(len(lengths), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    index = np.empty((samples + 1, 2), dtype)
    index[:, 0] = np.repeat(np.arange(len(lengths), dtype=dtype), here)
    index[:, 1] = np.arange(0, samples * sequence_length + 1, sequence_length) - np.repeat(starts[:-1], here)
    index[0] = 0, begin  # the walk begins at the first document even when that one is empty
    return index
