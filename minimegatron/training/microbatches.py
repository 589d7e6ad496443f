"""How many microbatches a step has, as a function of how many samples have been consumed.

The problem in a sentence: early in training a small batch learns more per sample, later a large one uses the machine
better, so the global batch size may grow during a run.

    dp ranks, each running N microbatches of b samples        global batch = N * b * dp
    ramp-up (start, increment, samples) to a global batch B:
        k = (B - start) / increment steps, one every samples / k
        global batch after `consumed` samples = start + floor(consumed / (samples / k)) * increment, at most B

The division is Megatron's, in floats, so that a run can be compared with Megatron's step by step. It can come one step
late on an exact boundary (58 / (58 / 7) is 6.999...); the next step then has the right size.

The size depends on consumed samples alone. They are part of every checkpoint, so a restart continues at the right size.

A batch size of the ramp-up that is no multiple of b * dp is refused before training starts, with the sizes; or, with
`decrease_batch_size_if_needed`, rounded down to one.

Smith et al. 2017 (arXiv 1711.00489): "Don't decay the learning rate, increase the batch size".
Megatron-LM: `megatron/core/num_microbatches_calculator.py`.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config import OptimizerConfig, TrainingConfig
from minimegatron.errors import ConfigError, require
from minimegatron.optim.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class BatchSizeRampup:
    """Megatron's `--rampup-batch-size start increment samples`.

    Attributes:
        start: first global batch size.
        increment: how much it grows at a time.
        samples: consumed samples after which the size is final.
    """

    start: int
    increment: int
    samples: int


@dataclasses.dataclass(frozen=True)
class NumMicrobatches:
    """Global batch size and number of microbatches at any point of a run.

    Args:
        global_batch_size: the final one.
        micro_batch_size: samples of one forward pass on one rank.
        data_parallel_size: replicas that share the global batch.
        rampup: how the global batch grows; None for a constant one.
        decrease_batch_size_if_needed: round down to a multiple of micro_batch_size * data_parallel_size instead of
            refusing.

    Raises:
        ConfigError: sizes that do not divide, listed.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1
    rampup: BatchSizeRampup | None = None
    decrease_batch_size_if_needed: bool = False

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size", "data_parallel_size"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}", "must be at least 1")
        sizes = [self.global_batch_size]
        if self.rampup:
            start, increment, samples = dataclasses.astuple(self.rampup)
            require(
                1 <= start <= self.global_batch_size and increment >= 1 and samples >= 0,
                f"rampup_batch_size {start} {increment} {samples} to global_batch_size {self.global_batch_size}",
                "choose 1 <= start <= global_batch_size, increment >= 1, samples >= 0",
            )
            require(
                (self.global_batch_size - start) % increment == 0,
                f"from {start} in steps of {increment} the batch size never becomes {self.global_batch_size}",
                "choose an increment that divides global_batch_size - start",
            )
            sizes = self._scheduled()
        multiple = self.micro_batch_size * self.data_parallel_size
        bad = [s for s in sizes if s < multiple or (s % multiple and not self.decrease_batch_size_if_needed)]
        require(
            not bad,
            f"global batch size {', '.join(map(str, bad[:8]))} is not a multiple of micro_batch_size * dp = "
            f"{self.micro_batch_size} * {self.data_parallel_size} = {multiple}",
            f"choose multiples of {multiple}"
            + ("" if min(bad, default=0) < multiple else ", or --decrease-batch-size-if-needed"),
        )

    def _scheduled(self) -> list[int]:
        """Every global batch size of the ramp-up."""
        rampup, final = self.rampup, self.global_batch_size
        return [final] if rampup is None else list(range(rampup.start, final + 1, rampup.increment))

    def all(self) -> list[int]:
        """Every number of microbatches that a rank will have in a step, from the first to the last."""
        multiple = self.micro_batch_size * self.data_parallel_size
        return sorted({size // multiple for size in self._scheduled()})

    def scheduled_batch_size(self, consumed_samples: int) -> int:
        """The global batch size of the ramp-up after `consumed_samples`."""
        final, rampup = self.global_batch_size, self.rampup
        if rampup is None or consumed_samples > rampup.samples:
            return final
        steps = (final - rampup.start) // rampup.increment
        if steps == 0 or rampup.samples == 0:
            return final
        return rampup.start + int(consumed_samples / (rampup.samples / steps)) * rampup.increment

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """The global batch size of the next step: as scheduled, rounded down if that was allowed."""
        multiple = self.micro_batch_size * self.data_parallel_size
        return self.scheduled_batch_size(consumed_samples) // multiple * multiple

    def at(self, consumed_samples: int) -> int:
        """Microbatches that each rank runs in the next step."""
        return self.global_batch_size_at(consumed_samples) // (self.micro_batch_size * self.data_parallel_size)

    def samples_of(self, iterations: int) -> int:
        """Samples of the first `iterations` steps of a run; steps of a ramp-up have fewer."""
        ramp, consumed, steps = self.rampup.samples if self.rampup else 0, 0, 0
        while consumed < ramp and steps < iterations:
            consumed += self.global_batch_size_at(consumed)
            steps += 1
        return consumed + (iterations - steps) * self.global_batch_size_at(max(consumed, ramp))


def iterations_of(training: TrainingConfig, batch_sizes: NumMicrobatches) -> int:
    """Steps of the run: `train_iters`, or as many as `train_samples` fill."""
    samples, consumed, steps = training.train_samples, 0, 0
    if samples is None:
        return training.train_iters
    ramp = batch_sizes.rampup.samples if batch_sizes.rampup else 0
    while consumed < min(ramp, samples):
        consumed += batch_sizes.global_batch_size_at(consumed)
        steps += 1
    steps += max(0, samples - consumed) // batch_sizes.global_batch_size_at(max(consumed, ramp))
    if steps == 0:
        size = batch_sizes.global_batch_size
        raise ConfigError(f"train_samples ({samples}) do not fill a global batch of {size}", fix=f"at least {size}")
    return steps


def rates_of(
    optimizer: OptimizerConfig, training: TrainingConfig, batch_sizes: NumMicrobatches, *, counted: bool = True
) -> Schedule:
    """The learning rate and weight decay of a run, as a schedule over its samples.

    Args:
        counted: lengths given in iterations count those of the ramp-up; else of the final batch size, as older versions
            did.

    Raises:
        ConfigError: lengths that do not fit together.
    """
    iterations = iterations_of(training, batch_sizes)
    return Schedule.from_config(
        optimizer,
        global_batch_size=batch_sizes.global_batch_size,
        train_iters=iterations,
        train_samples=training.train_samples or batch_sizes.samples_of(iterations),
        samples_of=batch_sizes.samples_of if counted else None,
    )
