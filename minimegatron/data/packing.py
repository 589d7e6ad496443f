"""Samples made of whole documents, each of which sees only itself.

The problem in a sentence: short documents in samples of s tokens are either padded, which wastes most of the work, or
concatenated, which lets a model read the document before; and cutting the stream every s tokens (`indices`) tears one
document in each sample apart.

A document of L tokens has L - 1 *pairs* of an input and its label: predict token i+1 from the tokens up to i. The pairs
are packed, so that each is learned once and none crosses a border:

    documents      a b c E      d e E      f g h i E                     s = 5
    pairs          a>b b>c c>E  d>e e>E    f>g g>h h>i i>E

    sample 0       tokens  a b c d e       labels  b c E e E       ids  0 0 0 1 1      positions  0 1 2 0 1
    sample 1       tokens  f g h i .       labels  g h i E .       ids  0 0 0 0 1      positions  0 1 2 3 0

The rest of a sample is padding, an id of its own, with a loss mask of 0. A document of more than s pairs is cut into
pieces, which do not see each other; a document of one token teaches nothing. Samples are filled by *best fit,
decreasing*: the longest piece first, each into the fullest sample that has room, which wastes at most 2/9 more than the
best packing and in practice next to nothing.

Attention keeps to the ids (`layers/attention/mask`), so a document's logits are bit for bit what they are beside any
other neighbour. Position ids begin at 0 in every piece.

Krell et al. 2021 (arXiv 2107.02027). Megatron-LM packs in its datasets for fine-tuning
(`megatron/training/datasets/sft_dataset.py`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import torch

from minimegatron.data.gpt_dataset import Batch, GPTDatasetConfig, LowLevelDataset, ReadInEpochs, kept_arrays
from minimegatron.data.indexed import IndexedDataset
from minimegatron.data.indices import progress_bar
from minimegatron.errors import DataError


def pieces_of(lengths: np.ndarray, documents: np.ndarray, s: int) -> np.ndarray:
    """[pieces, 3] int64: (sequence, offset of the first input, pairs), of at most s pairs each, in order."""
    pairs = np.maximum(lengths[documents].astype(np.int64) - 1, 0)
    counts = -(-pairs // s)  # pieces of each document
    which = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((documents[which].astype(np.int64), number * s, np.minimum(pairs[which] - number * s, s)), axis=1)


def best_fit_decreasing(sizes: np.ndarray, capacity: int, progress: bool = False) -> np.ndarray:
    """Put items into bins.

    Args:
        sizes: [n], each between 1 and `capacity`.
        capacity: size of a bin.
        progress: show a bar on stderr, if it takes long.

    Returns:
        The bin of each item, [n] int64, numbered from 0.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    open_bins: dict[int, list[int]] = {}  # free room -> bins that have it
    rooms: list[int] = []  # its keys, ascending
    made, bar = 0, progress_bar(len(sizes), "packing", progress)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[at]
        else:
            room, chosen, made = capacity, made, made + 1
        bins[item] = chosen
        if left := room - size:
            if left not in open_bins:
                open_bins[left] = []
                bisect.insort(rooms, left)
            open_bins[left].append(chosen)
        bar.update()
    bar.close()
    return bins


def pack(lengths: np.ndarray, documents: np.ndarray, s: int, progress: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in the order of their samples, and where each sample begins among them.

    Returns:
        [pieces, 3] as `pieces_of`, and [samples + 1] int64.

    Raises:
        DataError: no document has two tokens.
    """
    pieces = pieces_of(lengths, documents, s)
    if len(pieces) == 0:
        raise DataError(
            f"{len(documents)} documents of less than two tokens", fix="give this split a larger share of --split"
        )
    bins = best_fit_decreasing(pieces[:, 2], s, progress)
    order = np.argsort(bins, kind="stable")  # inside a sample in the order of the data
    return pieces[order], np.concatenate(([0], np.cumsum(np.bincount(bins))))


class PackedDataset(ReadInEpochs):
    """The samples of one split of one dataset, packed.

    Args:
        dataset: the tokens.
        documents: [P] sequences of this split.
        num_samples: at least this many, over as many epochs as needed; None for one epoch.
        config: sequence length, tokenizer, seed; positions and attention are those of the pieces whatever it says.

    Attributes:
        pieces: [n, 3], (sequence, offset, pairs).
        starts: [samples of an epoch + 1] index of each sample's first piece in `pieces`.
        num_epochs: how often each document is read; each epoch has the samples in another order, which is drawn when
            the epoch is read, from the generator as the earlier epochs leave it.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(
        self, dataset: LowLevelDataset, documents: np.ndarray, num_samples: int | None, config: GPTDatasetConfig
    ) -> None:
        self.dataset, self.config = dataset, config
        s = config.sequence_length

        def build() -> dict[str, np.ndarray]:
            packed = pack(dataset.sequence_lengths, documents, s, config.progress)
            return dict(zip(("pieces", "starts"), packed, strict=True))

        if isinstance(dataset, IndexedDataset):
            arrays = kept_arrays(dataset, documents, config, {"arrays": "PackedDataset"}, build)
        else:
            arrays = build()
        self.pieces, self.starts = arrays["pieces"], arrays["starts"]
        self.documents, self._rows = documents, len(self.starts) - 1
        self.num_epochs = 1 if num_samples is None else max(1, -(-num_samples // self._rows))
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.num_epochs * self._rows

    def _row(self, k: int) -> int:
        """The index of sample k among the packed samples."""
        epoch = self.epoch_of(k)
        if epoch < self._epoch or self._epoch < 0:
            self._epoch, self._rng = -1, np.random.RandomState(self.config.random_seed)
        while self._epoch < epoch:
            self._epoch, self._order = self._epoch + 1, self._rng.permutation(self._rows)
        return int(self._order[k % self._rows])

    def epoch_of(self, k: int) -> int:
        """The epoch of sample k."""
        return k // self._rows

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        return {self.name: samples / self._rows}

    @property
    def fill(self) -> float:
        """Share of the positions of all samples that hold a pair; the rest is padding."""
        return float(self.pieces[:, 2].sum()) / (self._rows * self.config.sequence_length)

    def batch(self, samples: Sequence[int]) -> Batch:
        """tokens, labels, position_ids, document_ids: [b, s] int64; loss_mask: [b, s] float32.

        Raises:
            DataError: an id outside the vocabulary.
        """
        b, s = len(samples), self.config.sequence_length
        arrays = {name: np.zeros((b, s), dtype=np.int64) for name in ("tokens", "labels", "position_ids")}
        document_ids, loss_mask = np.zeros((b, s), dtype=np.int64), np.zeros((b, s), dtype=np.float32)
        for i, k in enumerate(samples):
            row, at = self._row(k), 0
            pieces = self.pieces[self.starts[row] : self.starts[row + 1]].tolist()
            for number, (sequence, offset, pairs) in enumerate(pieces):
                text = self.dataset.get(sequence, offset, pairs + 1)
                place = slice(at, at + pairs)
                arrays["tokens"][i, place], arrays["labels"][i, place] = text[:-1], text[1:]
                arrays["position_ids"][i, place] = np.arange(pairs)
                document_ids[i, place], loss_mask[i, place] = number, 1.0
                at += pairs
            document_ids[i, at:], arrays["position_ids"][i, at:] = len(pieces), np.arange(s - at)
        self._check(arrays, samples)
        if self.config.eod_mask_loss:
            loss_mask[arrays["tokens"] == self.config.tokenizer.eod] = 0.0
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return batch | {"document_ids": torch.from_numpy(document_ids), "loss_mask": torch.from_numpy(loss_mask)}

    def _check(self, arrays: dict[str, np.ndarray], samples: Sequence[int]) -> None:
        size = self.config.tokenizer.vocab_size
        bad = np.argwhere((arrays["tokens"] >= size) | (arrays["labels"] >= size) | (arrays["tokens"] < 0))
        if len(bad):
            i, j = bad[0].tolist()
            raise DataError(
                f"token {arrays['tokens'][i, j]} or its label {arrays['labels'][i, j]} is outside the vocabulary "
                f"[0, {size})",
                where=f"packed sample {samples[i]}, place {j}",
                fix="use the tokenizer the data was made with",
            )
