"""A line of the log when an epoch of the training data begins."""

from __future__ import annotations

import math
from collections.abc import Callable

from minimegatron.data.builder import Dataset
from minimegatron.training.observers import Observer, Step


class EpochLines(Observer):
    """A line when an epoch begins, but for the first; of several in an interval of the log the last.

    Args:
        train: the training set.
        samples: of all steps.
        interval: steps between lines of the log.
        say: prints a line; None on ranks that print nothing.
    """

    def __init__(self, train: Dataset, samples: int, interval: int, say: Callable[[str], None] | None) -> None:
        self.train, self.interval, self.say = train, interval, say
        self.epochs = {name: math.ceil(n) for name, n in train.read_epochs(samples).items()}
        self._begun: dict[str, tuple[int, int]] = {}

    def after_step(self, step: Step) -> None:
        if step.report is None or self.say is None:
            return
        begun = self.train.begun(step.first, step.consumed_samples)
        self._begun |= {name: (epoch, step.iteration) for name, epoch in begun.items()}
        if step.iteration % self.interval == 0:
            told, self._begun = self._begun, {}
            for name, (epoch, iteration) in told.items():
                of = f" of {name}" if len(self.epochs) > 1 else ""
                self.say(
                    f"epoch {epoch + 1} of {max(self.epochs[name], epoch + 1)}{of} begins in iteration {iteration}"
                )
