"""The micro-batches of one data-parallel rank; the whole state is (seed, consumed samples).

Samples are consumed in one order that no layout changes. With micro-batch size b and D data-parallel ranks, the next
b*D samples after the first c are shared out in slices of b::

    rank r's micro-batch j      =  order[c + j*b*D + r*b : ... + b]
    optimizer step of m of them =  order[c : c + m*b*D], whatever b and D are

so a run can stop after any step and go on with another b or D and see the very same samples in every step. `order` is a
pure function of position and seed; nothing is drawn, so nothing has to be saved but how far the run is.

| `dataloader_type` | order                                                                                            |
|-------------------|--------------------------------------------------------------------------------------------------|
| `single`          | 0, 1, 2 ... once; `GPTDataset` has shuffled already and holds all epochs                         |
| `cyclic`          | epoch after epoch for ever, each a permutation of all samples by `RandomState([seed, epoch])`    |

`single` is Megatron's order. Megatron's `cyclic` drops the samples that do not fill the last b*D of an epoch, so that
its order depends on b and D, and seeds by the epoch alone; ours drops nothing and uses the seed.

The last samples of `single` may not fill b*D: `drop_last` leaves them out; without it the missing places are filled
with sample 0 under a loss mask of 0: every rank still runs the same shapes, and every sample counts once.

In Megatron-LM: `MegatronPretrainingSampler` in `megatron/training/datasets/data_samplers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from minimegatron.data.gpt_dataset import Batch
from minimegatron.errors import ConfigError, DataError

DATALOADER_TYPES = ("single", "cyclic")


class MapDataset(Protocol):
    """Any dataset with a length and samples that are dicts of equally shaped tensors.

    One with a method `batch(samples) -> Batch` is asked for whole batches (`GPTDataset`, `BlendedDataset`).
    """

    def __len__(self) -> int: ...
    def __getitem__(self, k: int, /) -> Batch: ...


class DataLoader:
    """Iterates over one rank's micro-batches, from `consumed_samples` on.

    Args:
        dataset: the samples.
        micro_batch_size: b.
        dp_rank, dp_size: this rank's place among the data-parallel ranks (with context parallelism all ranks of a cp
            group load the same samples, so these are of the axis dp, not dp_cp).
        seed: of the `cyclic` order.
        consumed_samples: how many all ranks together have trained on.
        dataloader_type: `single` or `cyclic`.
        drop_last: see the module docstring.

    Raises:
        ConfigError: sizes that make no sense.
        DataError: no samples are left.
    """

    def __init__(
        self,
        dataset: MapDataset,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        seed: int = 1234,
        consumed_samples: int = 0,
        dataloader_type: str = "single",
        drop_last: bool = True,
    ) -> None:
        if micro_batch_size < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size:
            raise ConfigError(
                f"micro_batch_size {micro_batch_size}, dp_rank {dp_rank} of dp_size {dp_size}",
                fix="choose micro_batch_size >= 1 and 0 <= dp_rank < dp_size",
            )
        if dataloader_type not in DATALOADER_TYPES:
            raise ConfigError(f"dataloader_type {dataloader_type!r}", fix=f"one of {', '.join(DATALOADER_TYPES)}")
        if len(dataset) == 0:
            raise DataError("the dataset has no sample", fix="give it more documents, or a shorter seq_length")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.dataloader_type = dataloader_type
        self.drop_last = drop_last
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)
        self.consumed_samples = consumed_samples
        self._check_position()

    def _check_position(self) -> None:
        consumed, total = self.consumed_samples, len(self.dataset)
        if consumed < 0 or (self.dataloader_type == "single" and consumed >= total):
            raise DataError(
                f"{consumed} samples are consumed of {total}; none is left",
                fix="ask for more samples (more --train-iters), or --dataloader-type cyclic",
            )

    def __len__(self) -> int:
        """Micro-batches left on this rank.

        Raises:
            TypeError: `cyclic` has no end.
        """
        if self.dataloader_type == "cyclic":
            raise TypeError("a cyclic loader has no length")
        left, together = len(self.dataset) - self.consumed_samples, self.micro_batch_size * self.dp_size
        return left // together if self.drop_last else -(-left // together)

    def sample_ids(self, begin: int, end: int) -> list[int]:
        """Dataset indices of positions [begin, end) of the order. Those behind the end of `single` are left out."""
        total = len(self.dataset)
        if self.dataloader_type == "single":
            return list(range(begin, min(end, total)))
        return [self._permuted(position // total, position % total) for position in range(begin, end)]

    def _permuted(self, epoch: int, place: int) -> int:
        if epoch != self._epoch:
            rng = np.random.RandomState([self.seed % 2**32, epoch])
            self._epoch, self._permutation = epoch, rng.permutation(len(self.dataset))
        return int(self._permutation[place])

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches: dicts of [b, ...] tensors; `consumed_samples` advances by b*D with each."""
        together = self.micro_batch_size * self.dp_size
        while self.dataloader_type == "cyclic" or len(self) > 0:
            begin = self.consumed_samples + self.dp_rank * self.micro_batch_size
            batch = self._read(self.sample_ids(begin, begin + self.micro_batch_size))
            self.consumed_samples += together
            yield batch

    def _read(self, samples: list[int]) -> Batch:
        missing = self.micro_batch_size - len(samples)
        samples = samples + [0] * missing
        whole: Any = getattr(self.dataset, "batch", None)
        batch: Batch = whole(samples) if whole else _stack([self.dataset[k] for k in samples])
        if missing:
            batch["loss_mask"][-missing:] = 0.0
        return batch

    def state_dict(self) -> dict[str, int]:
        """All that a restart needs."""
        return {"seed": self.seed, "consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken, in this or another layout.

        Raises:
            DataError: no samples are left.
        """
        self.seed = state["seed"]
        self.consumed_samples = state["consumed_samples"]
        self._epoch = -1
        self._check_position()


def _stack(samples: list[Batch]) -> Batch:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
