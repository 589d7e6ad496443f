"""The training loop, from a run that is ready to trained weights.

    until done:  step -> count -> tell the observers -> stop?

Observers do the rest (`training/observers`): lines of the log, profiles, evaluations, checkpoints. `training/build`
makes the parts from a configuration.

| the run ends                  | because                                                                      |
|-------------------------------|------------------------------------------------------------------------------|
| after `train_iters` steps     | it is done                                                                   |
| `--exit-interval`             | the iteration is a multiple                                                  |
| a bad step                    | a loss is not finite or a spike, and `--bad-step stop`                       |
| `--exit-duration-in-mins`     | the time is up on some rank                                                  |
| SIGTERM                       | some rank received it: a scheduler wants the machine back                    |

One rank alone may know of the last two, so it says so in the message of the next step's loss, and all ranks end after
the same step. A second SIGTERM ends the process at once (143); a checkpoint that is not yet published is then as
if it had never begun.

**Bad steps.** A step is bad when its loss or a gradient is not finite, when its loss is a spike (above
`--spiky-loss-factor` times the mean of the last `WINDOW` good ones), or when all labels of its batch are masked. Every
rank decides this before the optimizer moves, from the same sums over all ranks. An overflow in fp16 with a dynamic
scale is no bad step: the scaler expects it.

| `--bad-step` | then                                                                                              |
|--------------|---------------------------------------------------------------------------------------------------|
| `stop`       | exit status 6                                                                                     |
| `skip`       | the weights stay; the run goes on with the next batch                                             |
| `rollback`   | the newest checkpoint of `--save` is loaded, and the run goes on with the batch after the bad one |

With `--rerun-mode validate_results`, the default, the first bad steps are taken again in place, and the message names
the operation, rank and sample, and says whether it was the data or the machine (`training/rerun`).

After `ROLLBACKS` rollbacks to one checkpoint the run stops. PaLM went back about 100 steps at each spike and left out
200 to 500 batches (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1). Megatron-LM: `train` in
`megatron/training/training.py`, `--check-for-spiky-loss` in `megatron/core/rerun_state_machine.py`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from minimegatron.comm.random import Snapshot
from minimegatron.data.gpt_dataset import Dataset
from minimegatron.errors import BadStep
from minimegatron.optim.scaler import loss_divisor
from minimegatron.training import rerun
from minimegatron.training.checkpointing import Checkpoints
from minimegatron.training.datasets import RunData, microbatches
from minimegatron.training.graphs import StepGraph
from minimegatron.training.microbatches import NumMicrobatches
from minimegatron.training.observers import Observer, Step
from minimegatron.training.observers.evaluation import Evaluation
from minimegatron.training.observers.metrics import Metrics
from minimegatron.training.reports import StepReport, total_loss
from minimegatron.training.run_state import RunState, TrainState
from minimegatron.training.step import StepOptions, train_step
from minimegatron.training.task import Task

WINDOW, ROLLBACKS = 16, 3
FINDINGS = 3  # bad steps that are taken again, at two or three steps each


class Trainer:
    """A run, ready to `train()`; `build.build_trainer` makes one.

    Args:
        state: the run; training begins at its counters.
        data: its data.
        train_set: its training set.
        batch_sizes: the batch sizes of all steps.
        train_iters: steps of the run.
        task: the forward pass and its loss.
        graph: the recorded passes of a step, or None.
        metrics: prints lines of the log.
        evaluation, checkpoints: two of the observers.
        observers: in the order in which they are called.
        started: `time.monotonic()` of the run's beginning.

    Attributes:
        state: the counters of the run.
        model, optimizer, scheduler, rng, run, mesh: parts of the run.
        history: the report of every step that this object took.
        findings: what the first bad steps were.
    """

    def __init__(
        self,
        *,
        state: RunState,
        data: RunData,
        train_set: Dataset,
        batch_sizes: NumMicrobatches,
        train_iters: int,
        task: Task,
        graph: StepGraph | None,
        metrics: Metrics,
        evaluation: Evaluation,
        checkpoints: Checkpoints,
        observers: Sequence[Observer],
        started: float,
    ) -> None:
        assert state.optimizer is not None and state.scheduler is not None and state.rng is not None
        self.run_state, self.state, self.run, self.mesh = state, state.counters, state.run, state.mesh
        self.model, self.optimizer, self.scheduler, self.rng = state.model, state.optimizer, state.scheduler, state.rng
        self.data, self.train_set, self.batch_sizes, self.train_iters = data, train_set, batch_sizes, train_iters
        self.task, self.forward_step, self.graph = task, task.forward_step, graph
        self.metrics, self.evaluation, self.checkpoints, self.observers = metrics, evaluation, checkpoints, observers
        self.started = started
        self.history = list[StepReport]()
        self.findings = list[rerun.Finding]()
        self.rollbacks = Counter[int]()
        self._fit_to_data()

    def train(self) -> TrainState:
        """Train to the end of the run, or until a rank wants to stop.

        Raises:
            BadStep: a loss or gradient that is not finite, or a spike; on all ranks, nothing was updated
                (`--bad-step`).
            RankError: replicas differ (`check_replicas_interval`), or the first step is not that of one process
                (`check_first_step`).
        """
        state, step = self.state, None
        for observer in self.observers:
            observer.begin(state.iteration)
        self.batches = self._batches(self.train_set, state.consumed_train_samples)
        with StopSignal() as signalled:
            while state.iteration < self.train_iters and not (step is not None and step.last):
                for observer in self.observers:
                    observer.before_step(state.iteration)
                with contextlib.ExitStack() as stack:
                    for observer in self.observers:
                        stack.enter_context(observer.during_step(state.iteration))
                    step = self._step(signalled.received or self._time_is_up())
                for observer in self.observers:
                    observer.after_step(step)
        reason = self._reason(step, signalled.received) if step is not None else ""
        for observer in self.observers:
            observer.end(state.iteration, reason)
        return state

    def evaluate(self, split: str = "validation", where: str = "") -> dict[str, float]:
        """Losses of `eval_iters` global batches of a split (`observers/evaluation`)."""
        return self.evaluation.evaluate(split, where)

    def close(self) -> None:
        """Close all observers: checkpoints, log files, profiles."""
        for observer in reversed(self.observers):
            observer.close()

    def _step(self, asks_to_stop: bool) -> Step:
        """Take one step and update the counters."""
        begun, state = time.perf_counter(), self.state
        first, before = state.consumed_train_samples, self.rng.snapshot()
        batch_size = self.batch_sizes.global_batch_size_at(first)
        report = None
        try:
            report = self._train_step(batch_size, asks_to_stop)
        except BadStep as error:
            self._after_bad_step(self._explained(error, before, first, batch_size), batch_size)
        else:
            state.iteration += 1
            state.validation_loss = None
            state.consumed_train_samples += batch_size
            state.skipped_iterations += report.skipped
            state.recent_losses = with_latest(state.recent_losses, report.losses)
            self.history.append(report)
        seconds = time.perf_counter() - begun
        stop = report is not None and report.stop
        last = stop or self._exits() or state.iteration == self.train_iters
        return Step(state.iteration, first, batch_size, state.consumed_train_samples, seconds, report, stop, last)

    def _train_step(self, batch_size: int, asks_to_stop: bool) -> StepReport:
        training, state = self.run.training, self.state
        num_microbatches = self.batch_sizes.at(state.consumed_train_samples)
        tokens = training.micro_batch_size * self.run.data.seq_length  # of a microbatch
        return train_step(
            self.forward_step,
            self.task.prepare(self.batches, num_microbatches),
            self.model,
            self.optimizer,
            self.scheduler,
            num_microbatches,
            StepOptions(
                batch_size=batch_size,
                loss_divisor=loss_divisor(self.run.model.dtype, tokens),
                asks_to_stop=asks_to_stop,
                forward_backward_func=self.graph,
                before_update=self._before_update,
                counts_per_token=self.task.counts_per_token,
            ),
        )

    def _before_update(self, losses: dict[str, float]) -> None:
        """Called before the weights are updated: refuse a spike, and wait for a save that still copies them."""
        self.refuse_spike(losses)
        for observer in self.observers:
            observer.before_update()

    def refuse_spike(self, losses: Mapping[str, float]) -> None:
        """Raise `BadStep` if the losses of a step are a spike after those of the last good ones."""
        refuse_spike(losses, self.state.recent_losses, self.run.training.spiky_loss_factor)

    def _explained(self, error: BadStep, before: Snapshot, first: int, batch_size: int) -> BadStep:
        """The error with what is found when the step is taken again (`training/rerun`), as long as that is news."""
        if self.run.training.rerun_mode == "disabled" or len(self.findings) == FINDINGS:
            return error
        self.findings.append(rerun.find(self, before, first, batch_size))
        if self.run.training.bad_step != "stop" and self.findings[-1].where:
            self.metrics.say(f"a bad step: {self.findings[-1].where}")
        return self.findings[-1].of(error)

    def _after_bad_step(self, error: BadStep, batch_size: int) -> None:
        """Go on without the batch of a bad step, from here or from the newest checkpoint (`--bad-step`); nothing was
        updated."""
        state, policy = self.state, self.run.training.bad_step
        if policy == "stop":
            raise error
        first = state.consumed_train_samples
        state.iteration += 1
        state.validation_loss = None
        state.skipped_iterations += 1
        state.consumed_train_samples += batch_size
        self.metrics.say(f"iteration {state.iteration} is bad: {error.what}; samples {first} to "
                         f"{first + batch_size - 1} are left out")  # fmt: skip
        if policy == "skip":
            return
        number = self.checkpoints.go_back(error)
        self.rollbacks[number] += 1
        if self.rollbacks[number] > ROLLBACKS:
            raise BadStep(error.what, fix=f"{ROLLBACKS} rollbacks to iteration {number} did not help: {error.fix}")
        state.consumed_train_samples = first + batch_size
        self._fit_to_data()
        self.batches = self._batches(self.train_set, state.consumed_train_samples)

    def _fit_to_data(self) -> None:
        """Shorten the run if rollbacks have left too few samples in the dataset."""
        state, size = self.state, self.batch_sizes.global_batch_size
        left = (len(self.train_set) - state.consumed_train_samples) // size
        if state.consumed_train_samples > state.iteration * size and state.iteration + left < self.train_iters:
            self.train_iters = state.iteration + left
            self.metrics.say(f"samples were left out: the run ends after iteration {self.train_iters}")

    def _batches(self, dataset: Dataset, consumed: int) -> Iterator[dict[str, torch.Tensor]]:
        return microbatches(dataset, self.run.training.micro_batch_size, self.mesh, consumed, self.mesh.device)

    def _time_is_up(self) -> bool:
        minutes = self.run.training.exit_duration_in_mins
        return minutes is not None and time.monotonic() - self.started > 60 * minutes

    def _exits(self) -> bool:
        interval = self.run.training.exit_interval
        return interval is not None and self.state.iteration % interval == 0

    def _reason(self, step: Step, signalled: bool) -> str:
        """Why the run ends early; or ""."""
        if step.stops:
            return "SIGTERM" if signalled else "the time is up on some rank, or SIGTERM reached it"
        return f"--exit-interval {self.run.training.exit_interval}" if self._exits() else ""


class StopSignal:
    """Inside the block SIGTERM sets `received` instead of ending the process; a second one ends it."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopSignal:
        # Only the main thread may set handlers; elsewhere (a notebook's worker) SIGTERM keeps its usual meaning.
        self.before: Any = None
        with contextlib.suppress(ValueError):
            self.before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def refuse_spike(losses: Mapping[str, float], recent: Sequence[float], factor: float | None) -> None:
    """Compare the sum of a step's losses with the mean of that of earlier good steps.

    Args:
        losses: losses of this step, equal on all ranks.
        recent: losses of the last good steps.
        factor: multiple of their mean that is a spike; None compares nothing.

    Raises:
        BadStep: the loss is a spike.
    """
    if factor is None or len(recent) < WINDOW:
        return
    total, mean = total_loss(losses), sum(recent) / len(recent)
    if total > factor * mean:
        raise BadStep(
            f"the loss is {total:.6g}, {total / mean:.3g} times the mean of the last {len(recent)} good steps",
            fix="look at the samples of this step; --bad-step skip or rollback goes on without them",
        )


def with_latest(recent: Sequence[float], losses: Mapping[str, float]) -> list[float]:
    """The losses of the last good steps, this one included."""
    return [*recent, total_loss(losses)][-WINDOW:]
