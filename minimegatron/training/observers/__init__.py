"""Observers of a training: whatever logs, profiles, counts memory, compares replicas, evaluates or saves.

The trainer knows none of them by name. It calls each observer, in the order of its list:

| moment                                       | method                | for example                                   |
|----------------------------------------------|-----------------------|-----------------------------------------------|
| before the first step                        | `begin(done)`         | the first batch in one process (`checks`)     |
| before each step                             | `before_step(done)`   | a profile begins                              |
| around it, and what follows from a bad one   | `during_step(done)`   | memory is counted                             |
| before the optimizer moves the weights       | `before_update()`     | the copies of a save are waited for           |
| after each step, good or bad                 | `after_step(step)`    | a line, an evaluation, a checkpoint           |
| after the last                               | `end(done, reason)`   | the last evaluations                          |
| when the run is over, or has failed          | `close()`, backwards  | files                                         |

All ranks have the same observers, because some of them communicate.
"""

from __future__ import annotations

import contextlib
import dataclasses

from minimegatron.training.reports import StepReport


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is over.

    Attributes:
        iteration: steps taken, this one included; after a rollback those of the checkpoint.
        first: its first sample; as many as `batch_size` were read over all ranks.
        batch_size: in samples, over all ranks.
        consumed_samples: of all steps up to and with this one.
        seconds: its wall time.
        report: what it did; None for a bad step, in which nothing has moved.
        stops: a rank has asked for the end of the run.
        last: the run ends after it.
    """

    iteration: int
    first: int
    batch_size: int
    consumed_samples: int
    seconds: float
    report: StepReport | None
    stops: bool = False
    last: bool = False


class Observer:
    """Watches a training; every method here does nothing."""

    def begin(self, done: int) -> None:
        """Called once, before the first step; `done` are behind a run that goes on."""

    def before_step(self, done: int) -> None:
        """Called before each step, when `done` are behind us."""

    def during_step(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Entered before the step, left after it and what followed from a bad one."""
        return contextlib.nullcontext()

    def before_update(self) -> None:
        """Called before the optimizer moves the weights."""

    def after_step(self, step: Step) -> None:
        """Called after each step."""

    def end(self, done: int, reason: str) -> None:
        """Called after the last step; `reason` says why the run ends before it is done, else it is empty."""

    def close(self) -> None:
        """Called when the run is over, also after an error: let go of files."""
