"""Several datasets in given shares.

At step n draw from the dataset that lags its share the most::

    i_n = argmax_i ( w_i * max(n, 1) - count_i )        ties: the lowest i

so that after any number of draws every dataset is within one sample of its share; no random number is involved. The
draw takes the next sample, number `count_i`, of dataset i, whose own samples are shuffled already. A dataset smaller
than its share is read for more epochs. Without weights each dataset is read once, spread evenly ("exhaustive").

In Megatron-LM: `blended_dataset.py` and `helpers.cpp` in `megatron/core/datasets`. The draws are equal to Megatron's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minimegatron.data.gpt_dataset import GPTDataset, read_batch
from minimegatron.data.index_cache import cached_arrays
from minimegatron.data.masking import Batch
from minimegatron.data.packing import PackedDataset
from minimegatron.errors import DataError


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`size` draws by weights that sum to 1; a weight of 0 is never drawn.

    Returns:
        dataset of each draw, [size] int16; sample of that dataset, [size] int64.
    """
    active = np.flatnonzero(weights)
    shares = np.asarray(weights, dtype=np.float64)[active]
    datasets, samples = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    counts, lag = np.zeros(len(active)), np.empty(len(active))
    for n in range(size):
        np.multiply(shares, max(n, 1), out=lag)
        np.subtract(lag, counts, out=lag)
        chosen = int(lag.argmax())
        datasets[n], samples[n] = active[chosen], counts[chosen]
        counts[chosen] += 1
    return datasets, samples


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Every sample of every dataset once, spread evenly. Returns as `build_blending_indices`, of length sum(sizes).

    A dataset that has given all it has lags by less than nothing, so the rule itself never asks it again.
    """
    return build_blending_indices(normalize(sizes), sum(sizes))


class BlendedDataset:
    """Samples of several datasets in given shares.

    Args:
        datasets: all of one configuration.
        weights: shares (any scale), one a dataset; None to read each dataset once.
        size: number of samples; None for all, where there are no weights.

    Attributes:
        dataset_index: [n] which dataset each sample comes from.
        dataset_sample_index: [n] which of its samples.

    Raises:
        DataError: a dataset has fewer samples than its share.
    """

    def __init__(
        self, datasets: Sequence[GPTDataset | PackedDataset], weights: Sequence[float] | None, size: int | None
    ) -> None:
        self.datasets, self.config = datasets, datasets[0].config
        lengths = [len(dataset) for dataset in datasets]
        shares = None if weights is None else normalize(weights)

        def build() -> dict[str, np.ndarray]:
            if shares is None:
                names, samples = build_exhaustive_blending_indices(lengths)
                return {"dataset_index": names[:size], "dataset_sample_index": samples[:size]}
            assert size is not None, "weights go with a size"
            names, samples = build_blending_indices(shares, size)
            return {"dataset_index": names, "dataset_sample_index": samples}

        description = {"arrays": "BlendedDataset", "lengths": lengths, "shares": shares, "size": size}
        arrays = cached_arrays(self.config.path_to_cache, description, build)
        self.dataset_index, self.dataset_sample_index = arrays["dataset_index"], arrays["dataset_sample_index"]
        for i, drawn in enumerate(np.bincount(self.dataset_index)):
            if drawn > lengths[i]:
                raise DataError(
                    f"the blend draws {drawn} samples of dataset {i}, which has {lengths[i]}",
                    fix="give it a smaller weight, or more documents",
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def fill(self, k: int, row: np.ndarray) -> None:
        """Copy the s + 1 tokens of sample k into `row`."""
        dataset = self.datasets[self.dataset_index[k]]
        assert isinstance(dataset, GPTDataset), "packed samples are more than a row of tokens"
        dataset.fill(int(self.dataset_sample_index[k]), row)

    def batch(self, samples: Sequence[int]) -> Batch:
        """The samples as one batch: see `masking.make_batch` for names and shapes."""
        if not self.config.sequence_packing:
            return read_batch(self, samples)
        drawn = ((self.datasets[self.dataset_index[k]], int(self.dataset_sample_index[k])) for k in samples)
        parts = [dataset.batch([sample]) for dataset, sample in drawn]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def __getitem__(self, k: int) -> Batch:
        """Sample k: the tensors of `make_batch` without the batch dimension."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return {name: tensor[0] for name, tensor in self.batch([k]).items()}


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum."""
    array = np.asarray(weights, dtype=np.float64)
    return (array / array.sum()).tolist()
