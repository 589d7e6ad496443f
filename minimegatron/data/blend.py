"""Several datasets in given shares.

At step n draw from the dataset that lags its share the most::

    i_n = argmax_i ( w_i * max(n, 1) - count_i )        ties: the lowest i

so that after any number of draws every dataset is within one sample of its share; no random number is involved. The
draw takes the next sample, number `count_i`, of dataset i, whose own samples are shuffled already. A dataset smaller
than its share is read for more epochs. Without weights each dataset is read once, spread evenly ("exhaustive").

Draw n follows from the weights alone, so a longer run begins with the draws of a shorter one. They are made as they are
read, in blocks, and of a block that is left only its counts are kept: a run of any length needs the same memory.

To go on at draw n, the counts before it must be known. Where the shares are multiples of 1/W they are known at every
multiple of W: lags w_i n - count_i are integers there; they add up to 0, as n draws were made; and each is above -1,
because only the largest, which is no less than 0, is ever drawn and made less by 1. So all are 0, and
count_i = w_i n, whoever won the ties. From there to n it is less than W draws. Shares that are no such multiples cost
2 microseconds for each draw.

In Megatron-LM: `blended_dataset.py` and `helpers.cpp` in `megatron/core/datasets`. The draws are equal to Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from minimegatron.data.bert_dataset import BertDataset
from minimegatron.data.gpt_dataset import Batch, GPTDataset, SampleDataset, read_batch
from minimegatron.data.indices import progress_bar
from minimegatron.data.packing import PackedDataset

BLOCK = 1 << 13  # draws that are made at a time


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`size` draws by weights that sum to 1; a weight of 0 is never drawn.

    Returns:
        dataset of each draw, [size] int16; sample of that dataset, [size] int64.
    """
    return draw(weights, np.zeros(len(weights)), 0, size)


def draw(weights: Sequence[float], counts: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws [begin, end).

    Args:
        weights: sum to 1; a weight of 0 is never drawn.
        counts: [datasets] float64, how often each was drawn before `begin`; updated to `end`.
        begin, end: the draws.

    Returns:
        dataset of each draw, int16; sample of that dataset, int64.
    """
    active = np.flatnonzero(weights)
    shares, so_far = np.asarray(weights, dtype=np.float64)[active], counts[active]
    datasets, samples = np.empty(end - begin, dtype=np.int16), np.empty(end - begin, dtype=np.int64)
    lag = np.empty(len(active))
    for n in range(begin, end):
        np.multiply(shares, max(n, 1), out=lag)
        np.subtract(lag, so_far, out=lag)
        chosen = int(lag.argmax())
        datasets[n - begin], samples[n - begin] = active[chosen], so_far[chosen]
        so_far[chosen] += 1
    counts[active] = so_far
    return datasets, samples


def period(shares: Sequence[float]) -> int | None:
    """W, the least number such that all shares, normalised, are multiples of 1/W; None if it would be above 2^24."""
    parts = [Fraction(share).limit_denominator(1 << 24) for share in shares]
    whole = math.lcm(*(part.denominator for part in parts))
    near = all(abs(part - Fraction(share)) < Fraction(1, 1 << 50) for part, share in zip(parts, shares, strict=True))
    return whole if near and whole <= 1 << 24 and sum(parts) == 1 else None


class BlendedDataset(SampleDataset):
    """Samples of several datasets in given shares.

    Args:
        datasets: all of one configuration.
        weights: shares (any scale), one a dataset; None to read each dataset once.
        size: number of samples; None for all, without weights.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset | PackedDataset | BertDataset],
        weights: Sequence[float] | None,
        size: int | None,
    ) -> None:
        self.datasets, self.config = datasets, datasets[0].config
        lengths = [len(dataset) for dataset in datasets]
        assert weights is None or size is not None, "weights go with a size"
        self.shares = normalize(lengths if weights is None else weights)
        self._size = sum(lengths) if size is None else size if weights else min(size, sum(lengths))
        self._period = period(self.shares)
        self._counts = {0: np.zeros(len(datasets))}  # before some draws, those of each dataset
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return self._size

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws [number * BLOCK, + BLOCK)."""
        if number not in self._blocks:
            begin = number * BLOCK
            at = begin if begin in self._counts else max(n for n in self._counts if n < begin)
            counts = self._counts[at].copy()
            whole = begin - begin % self._period if self._period else 0
            if whole > at:
                at, counts = whole, np.rint(whole * np.asarray(self.shares))
            bar = progress_bar(begin - at, "blending", self.config.progress and begin - at > 64 * BLOCK)
            while at < begin:
                end = min(at + BLOCK, begin)
                draw(self.shares, counts, at, end)
                bar.update(end - at)
                at = end
            bar.close()
            found = draw(self.shares, counts, begin, begin + BLOCK)
            self._counts[begin + BLOCK] = counts
            self._blocks = dict([*list(self._blocks.items())[-1:], (number, found)])
        return self._blocks[number]

    def draws(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """For samples [first, end) the dataset, int16, and the number of the sample in it, int64."""
        parts = []
        for number in range(first // BLOCK, -(-end // BLOCK)):
            part = slice(max(first - number * BLOCK, 0), end - number * BLOCK)
            parts.append([array[part] for array in self._block(number)])
        datasets, samples = zip(*parts, strict=True)
        return np.concatenate(datasets), np.concatenate(samples)

    def find(self, k: int) -> tuple[GPTDataset | PackedDataset, int]:
        """The dataset of sample k, and its number there."""
        datasets, samples = self._block(k // BLOCK)
        return self.datasets[datasets[k % BLOCK]], int(samples[k % BLOCK])

    def read_epochs(self, samples: int) -> dict[str, float]:
        """{name: how many epochs of it the first `samples` samples are}."""
        parts = zip(self.datasets, self.shares, strict=True)
        return {name: n for data, share in parts for name, n in data.read_epochs(round(samples * share)).items()}

    def begun(self, first: int, end: int) -> dict[str, int]:
        """{name: the last epoch, from 0, that begins with a sample of [first, end)}, of each dataset."""
        datasets, samples = self.draws(first, end)
        found: dict[str, int] = {}
        for i in np.unique(datasets).tolist():
            drawn = samples[datasets == i]
            found |= self.datasets[i].begun(int(drawn[0]), int(drawn[-1]) + 1)
        return found

    def fill(self, k: int, row: np.ndarray) -> None:
        """Copy the s + 1 tokens of sample k into `row`."""
        dataset, sample = self.find(k)
        assert isinstance(dataset, GPTDataset), "packed samples are more than a row of tokens"
        dataset.fill(sample, row)

    def batch(self, samples: Sequence[int]) -> Batch:
        """The samples as one batch: see `gpt_dataset.make_batch` for names and shapes."""
        if not self.config.sequence_packing:
            return read_batch(self, samples)
        parts = [dataset.batch([sample]) for dataset, sample in map(self.find, samples)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum."""
    array = np.asarray(weights, dtype=np.float64)
    return (array / array.sum()).tolist()
