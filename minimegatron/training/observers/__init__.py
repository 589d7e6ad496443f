"""Observers of training: they log, profile, count memory, compare replicas, evaluate and save.

The trainer knows none of them by name. It calls each observer, in the order of its list:

| moment                                       | method                | for example                                   |
|----------------------------------------------|-----------------------|-----------------------------------------------|
| before the first step                        | `begin(done)`         | the first batch in one process (`checks`)     |
| before each step                             | `before_step(done)`   | a profile begins                              |
| around it, and the handling of a bad one     | `during_step(done)`   | memory is counted                             |
| before the optimizer updates the weights     | `before_update()`     | wait for the copies of a save                 |
| after each step, good or bad                 | `after_step(step)`    | a line, an evaluation, a checkpoint           |
| after the last step                          | `end(done, reason)`   | the last evaluations                          |
| when the run has ended or failed             | `close()`, backwards  | files are closed                              |

All ranks have the same observers, because some of them communicate.
"""

from __future__ import annotations

import contextlib
import dataclasses

from minimegatron.training.reports import StepReport


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that has ended.

    Attributes:
        iteration: steps taken, this one included; after a rollback those of the checkpoint.
        first: number of its first sample.
        batch_size: samples over all ranks.
        consumed_samples: samples of all steps up to and including this one.
        seconds: its wall time.
        report: its report; None for a bad step, in which nothing was updated.
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
    """Called at fixed moments of training; every method here does nothing."""

    def begin(self, done: int) -> None:
        """Called once, before the first step; a run that goes on has taken `done` steps."""

    def before_step(self, done: int) -> None:
        """Called before each step; `done` steps have been taken."""

    def during_step(self, done: int) -> contextlib.AbstractContextManager[None]:
        """Entered before the step, left after it and after the handling of a bad one."""
        return contextlib.nullcontext()

    def before_update(self) -> None:
        """Called before the optimizer updates the weights."""

    def after_step(self, step: Step) -> None:
        """Called after each step."""

    def end(self, done: int, reason: str) -> None:
        """Called after the last step; `reason` says why the run ends early, or is empty."""

    def close(self) -> None:
        """Called when the run has ended, also after an error: close files."""
