"""Sequences in rows of s tokens: the training sets of the tasks.

An *item* is what a step counts: a conversation, or the pair of answers to a prompt. It has one or several sequences,
which must meet in one microbatch, so they stand in one row, each a document that sees only itself
(`layers/attention/mask`). As in `data/packing` a sequence of L ids has L - 1 pairs of an input and its label, and the
mask belongs to the label: the first token of an answer is predicted from the last token of the prompt, and counts.

    item 0        P p a E (a, E count)      P p b c E (b, c, E count)         s = 10

    tokens        P p a   P p b c   . . .
    labels        p a E   p b c E   . . .
    loss_mask     0 1 1   0 1 1 1   0 0 0
    document_ids  0 0 0   1 1 1 1   2 2 2
    position_ids  0 1 2   0 1 2 3   0 1 2

Without packing each item has a row of its own. With packing rows are filled by best fit (`data/packing`), and the
sequences of a row are numbered on, so those of item i of a row of pairs are documents 2i and 2i + 1. An epoch reads all
rows, in an order drawn from the seed.

**Too long.** An item that does not fit into a row loses the end of its longest sequences; if then no label counts it is
left out. Both are counted, and the run says so: a conversation that is silently cut never shows its stop token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.data.packing import best_fit_decreasing
from minimegatron.errors import DataError
from minimegatron.posttraining.conversations import Tokens


@dataclasses.dataclass(frozen=True)
class Items:
    """Items as arrays.

    Attributes:
        ids: [n] int32, the ids of all sequences, one after the other.
        counts: [n] bool, whether the loss counts the id as a label.
        sequences: [S + 1] where each sequence begins.
        items: [I + 1] at which sequence each item begins.
        cut: items that lost an end.
        left_out: items of which nothing would count.
    """

    ids: np.ndarray
    counts: np.ndarray
    sequences: np.ndarray
    items: np.ndarray
    cut: int = 0
    left_out: int = 0

    @classmethod
    def of(cls, items: Sequence[Sequence[Tokens]], s: int) -> Items:
        """Items of at most s pairs each.

        Raises:
            DataError: no item is left.
        """
        kept, cut, left_out = [], 0, 0
        for item in items:
            fitting = fit(item, s)
            cut += fitting != list(item)
            if all(any(sequence.counts[1:]) for sequence in fitting):
                kept.append(fitting)
            else:
                left_out += 1
        if not kept:
            raise DataError(
                f"none of {len(items)} examples has a label that counts within {s} tokens", fix="a larger --seq-length"
            )
        flat = [sequence for item in kept for sequence in item]
        return cls(
            np.concatenate([np.asarray(sequence.ids, dtype=np.int32) for sequence in flat]),
            np.concatenate([np.asarray(sequence.counts, dtype=bool) for sequence in flat]),
            np.cumsum([0, *(len(sequence.ids) for sequence in flat)]),
            np.cumsum([0, *(len(item) for item in kept)]),
            cut,
            left_out,
        )

    def __len__(self) -> int:
        return len(self.items) - 1

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it as arrays by name, for a cache."""
        lost = np.array([self.cut, self.left_out])
        return {"ids": self.ids, "counts": self.counts, "sequences": self.sequences, "items": self.items, "lost": lost}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Items:
        """The inverse of `arrays`."""
        cut, left_out = arrays["lost"].tolist()
        return cls(arrays["ids"], arrays["counts"], arrays["sequences"], arrays["items"], cut, left_out)

    @property
    def sizes(self) -> np.ndarray:
        """[I] pairs of input and label of each item."""
        pairs = np.diff(self.sequences) - 1
        return np.add.reduceat(pairs, self.items[:-1])

    def sequence(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a sequence, and which of them count."""
        place = slice(self.sequences[number], self.sequences[number + 1])
        return self.ids[place], self.counts[place]

    def part(self, first: int, stop: int) -> Items:
        """Items [first, stop)."""
        a, b = self.items[first], self.items[stop]
        place = slice(self.sequences[a], self.sequences[b])
        starts = self.sequences[a : b + 1] - self.sequences[a]
        return Items(self.ids[place], self.counts[place], starts, self.items[first : stop + 1] - a)

    @property
    def digest(self) -> str:
        """Of all that a run reads."""
        total = hashlib.blake2b(digest_size=8)
        for array in (self.ids, self.counts, self.sequences, self.items):
            total.update(np.ascontiguousarray(array).tobytes())
        return total.hexdigest()


def fit(item: Sequence[Tokens], s: int) -> list[Tokens]:
    """The sequences, of s pairs together at most; the longest ones are cut, to equal lengths."""
    lengths = [max(len(sequence.ids) - 1, 0) for sequence in item]
    most = max(lengths)
    if sum(lengths) > s:
        short, rest = sorted(lengths), s
        for number, length in enumerate(short):
            most = rest // (len(short) - number)
            if length > most:
                break
            rest -= length
    return [sequence.cut(most + 1) for sequence in item]


class RowDataset(Dataset):
    """Rows of items, epoch after epoch.

    Args:
        items: the items.
        sequence_length: s.
        num_samples: at least this many rows, over as many epochs as needed; None for one epoch.
        seed: of the order of rows in each epoch.
        packs: fill rows with several items; else each item has its own.
        name: for the log.

    Attributes:
        rows: [R + 1] at which place of `order` each row of an epoch begins; `order` has the numbers of items.
        extra: name -> [n] float32, further numbers of each id of `items`; a batch has them as [b, s], of the labels.
    """

    known = False

    def __init__(
        self,
        items: Items,
        sequence_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        packs: bool = False,
        name: str = "conversations",
    ) -> None:
        self.items, self.sequence_length, self.seed, self.name = items, sequence_length, seed, name
        bins = best_fit_decreasing(items.sizes, sequence_length) if packs else np.arange(len(items))
        self.order = np.argsort(bins, kind="stable")
        self.rows = np.concatenate(([0], np.cumsum(np.bincount(bins))))
        self.num_epochs = 1 if num_samples is None else max(1, -(-num_samples // self.epoch_rows))
        self.extra: dict[str, np.ndarray] = {}

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch."""
        return len(self.rows) - 1

    def __len__(self) -> int:
        return self.num_epochs * self.epoch_rows

    def row(self, k: int) -> int:
        """The row of sample k."""
        epoch, place = divmod(k, self.epoch_rows)
        return int(np.random.default_rng([self.seed, epoch]).permutation(self.epoch_rows)[place])

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        return {self.name: samples / self.epoch_rows}

    def begun(self, first: int, end: int) -> dict[str, int]:
        """{name: the last epoch, from 0, that begins in samples [first, end)}; {} if no epoch but the first does."""
        last = (end - 1) // self.epoch_rows
        return {self.name: last} if last > ((first - 1) // self.epoch_rows if first else 0) else {}

    @property
    def fill(self) -> float:
        """Share of the positions of all rows that hold a pair; the rest is padding."""
        return float(self.items.sizes.sum()) / (self.epoch_rows * self.sequence_length)

    def batch(self, samples: Sequence[int]) -> Batch:
        """tokens, labels, position_ids, document_ids: [b, s] int64; loss_mask and `extra`: [b, s] float32."""
        return self.batch_of_rows([self.row(k) for k in samples])

    def batch_of_rows(self, rows: Sequence[int]) -> Batch:
        """The batch of rows by their numbers, in any epoch's order."""
        b, s, items = len(rows), self.sequence_length, self.items
        arrays = {name: np.zeros((b, s), dtype=np.int64) for name in ("tokens", "labels", "position_ids")}
        arrays |= {"document_ids": np.zeros((b, s), dtype=np.int64), "loss_mask": np.zeros((b, s), dtype=np.float32)}
        arrays |= {name: np.zeros((b, s), dtype=np.float32) for name in self.extra}
        for i, row in enumerate(rows):
            at = number = 0
            for first, stop in self.spans(row):
                place, labels = slice(at, at + stop - first - 1), slice(first + 1, stop)
                arrays["tokens"][i, place] = items.ids[first : stop - 1]
                arrays["labels"][i, place] = items.ids[labels]
                arrays["loss_mask"][i, place] = items.counts[labels]
                arrays["position_ids"][i, place] = np.arange(stop - first - 1)
                arrays["document_ids"][i, place] = number
                for name, numbers in self.extra.items():
                    arrays[name][i, place] = numbers[labels]
                at, number = place.stop, number + 1
            arrays["document_ids"][i, at:], arrays["position_ids"][i, at:] = number, np.arange(s - at)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def spans(self, row: int) -> Iterator[tuple[int, int]]:
        """Where in `items.ids` the sequences of a row begin and end, in order."""
        for item in self.order[self.rows[row] : self.rows[row + 1]]:
            for sequence in range(self.items.items[item], self.items.items[item + 1]):
                yield int(self.items.sequences[sequence]), int(self.items.sequences[sequence + 1])

    @functools.cached_property
    def most_sequences(self) -> int:
        """Sequences of the row that has most."""
        of_item = np.diff(self.items.items)[self.order]
        return int(np.add.reduceat(of_item, self.rows[:-1]).max())

    def keep(self, name: str, values: np.ndarray) -> None:
        """Keep a number for each label of all rows of an epoch, [R, s], as `extra[name]`."""
        for row, of_row in enumerate(values):
            at = 0
            for first, stop in self.spans(row):
                self.extra[name][first + 1 : stop] = of_row[at : at + stop - first - 1]
                at += stop - first - 1
