"""The micro-batches of one data-parallel rank; the whole state is how many samples have been consumed.

Samples are consumed in one order that no layout changes: 0, 1, 2 ... (the dataset has shuffled already and holds all
epochs). With micro-batch size b and D data-parallel ranks, the next b*D samples after the first c are shared out in
slices of b::

    rank r's micro-batch j      =  [c + j*b*D + r*b, + b)
    optimizer step of m of them =  [c, c + m*b*D), whatever b and D are

so a run can stop after any step and go on with another b or D and see the very same samples in every step. Samples at
the end that do not fill b*D are left out.

In Megatron-LM: `MegatronPretrainingSampler` in `megatron/training/datasets/data_samplers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from minimegatron.data.gpt_dataset import Batch, SampleDataset
from minimegatron.errors import ConfigError, DataError


class DataLoader:
    """Iterates over one rank's micro-batches, from `consumed_samples` on.

    Args:
        dataset: the samples.
        micro_batch_size: b.
        dp_rank, dp_size: this rank's place among the data-parallel ranks (with context parallelism all ranks of a cp
            group load the same samples, so these are of the axis dp, not dp_cp).
        consumed_samples: how many all ranks together have trained on.

    Raises:
        ConfigError: a size that is not possible.
        DataError: no samples are left.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
    ) -> None:
        if micro_batch_size < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size:
            raise ConfigError(
                f"micro_batch_size {micro_batch_size}, dp_rank {dp_rank} of dp_size {dp_size}",
                fix="choose micro_batch_size >= 1 and 0 <= dp_rank < dp_size",
            )
        if not 0 <= consumed_samples < len(dataset):
            raise DataError(
                f"{consumed_samples} samples are consumed of {len(dataset)}; none is left",
                fix="ask for more samples (more --train-iters), or give the dataset more documents",
            )
        self.dataset, self.micro_batch_size = dataset, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.consumed_samples = consumed_samples

    def __len__(self) -> int:
        """Micro-batches left on this rank."""
        return (len(self.dataset) - self.consumed_samples) // (self.micro_batch_size * self.dp_size)

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches: dicts of [b, ...] tensors; `consumed_samples` advances by b*D with each."""
        while len(self) > 0:
            begin = self.consumed_samples + self.dp_rank * self.micro_batch_size
            batch = self.dataset.batch(range(begin, begin + self.micro_batch_size))
            self.consumed_samples += self.micro_batch_size * self.dp_size
            yield batch
