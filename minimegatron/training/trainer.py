"""The training loop, from five configurations to trained weights.

    mesh -> random streams -> data (rank 0 first) -> model -> DDP -> optimizer -> schedule
    first step, held against one process if asked for
    until done:  step -> count -> log -> compare replicas -> evaluate -> stop?

Everything that could refuse does so before the first step: rules between the configurations (`rules.check_run`),
the layout when the mesh is built, the data when it is opened, the model when it is built.

| the run ends                  | because                                                                      |
|-------------------------------|------------------------------------------------------------------------------|
| after `train_iters` steps     | it is done                                                                   |
| `--exit-interval`             | the iteration is a multiple                                                  |
| a bad step                    | a loss is not finite or a spike, and `--bad-step stop` (`bad_steps.py`)      |
| `--exit-duration-in-mins`     | the time is up on some rank                                                  |
| SIGTERM                       | some rank received it: a scheduler wants the machine back                    |

The last two are one rank's knowledge, so they travel with the next step's loss and all ranks end after the same step. A
second SIGTERM ends the process at once (143), also while the first is being obeyed: a checkpoint that is not yet
published is then as if it had never begun.

Megatron-LM: `pretrain` and `train` in `megatron/training/training.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from minimegatron.comm.agree import on_all_ranks
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.comm.replicas import check_copies
from minimegatron.data.builder import Dataset
from minimegatron.errors import BadStep, DataError
from minimegatron.layers.param import copy_axes, layout_of, logical_parameters
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.spec import spec_from_name
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.groups import freeze
from minimegatron.optim.scaler import loss_divisor
from minimegatron.optim.schedule import OptimizerParamScheduler
from minimegatron.parallel.wrapping import data_parallel
from minimegatron.training.bad_steps import ROLLBACKS, refuse_spike, with_latest
from minimegatron.training.checkpointing import Checkpoints, continues
from minimegatron.training.datasets import Joint, load_data, microbatches
from minimegatron.training.described import EpochLines, describe_data, describe_machine, describe_run
from minimegatron.training.evaluate import evaluate
from minimegatron.training.experts import WINDOW
from minimegatron.training.first_step import check_first_step
from minimegatron.training.graphs import step_graph
from minimegatron.training.memory_report import MemoryReport
from minimegatron.training.metrics import Metrics
from minimegatron.training.microbatches import iterations_of, rates_of
from minimegatron.training.pipelined import get_forward_backward_fn
from minimegatron.training.profile import Profile
from minimegatron.training.reports import StepReport
from minimegatron.training.rules import batch_sizes, check_run
from minimegatron.training.run import RunConfig
from minimegatron.training.state import TrainState
from minimegatron.training.step import ForwardStep, StepOptions, forward_step, train_step
from minimegatron.training.stop_signal import StopSignal


class Trainer:
    """Everything a run holds, ready to `train()`.

    Args:
        run: what to train, how, on what.
        mesh: the layout, if the caller has built it; default from `run.parallel` and the process group.
        forward_step: the model's forward pass and its loss; default the language-model loss.
        quiet: print nothing.

    Attributes:
        state: counters.
        model, optimizer, scheduler: what is trained.
        history: the report of every step that this object took.

    Raises:
        ConfigError, DataError: before anything is trained, on every rank.
    """

    def __init__(
        self, run: RunConfig, mesh: Mesh | None = None, forward_step: ForwardStep = forward_step, quiet: bool = False
    ) -> None:
        self.started = time.monotonic()
        self.mesh = mesh if mesh is not None else Mesh.build(run.parallel)
        check_run(run, self.mesh.world.size)
        self.forward_step = forward_step
        self.state = TrainState()
        self.history = list[StepReport]()
        self.rollbacks = Counter[int]()
        self.batch_sizes = batch_sizes(run.training, self.mesh.dp.size)
        self.train_iters = iterations_of(run.training, self.batch_sizes)
        if self.mesh.rank == 0 and not quiet:
            print(describe_machine(run, self.mesh), flush=True)
        began = continues(run.checkpoint, self.mesh)
        wanted = self._samples_wanted(run, began)
        self.joint = self._joint(run, began, wanted)
        data = load_data(run, self.mesh, wanted, self.joint, quiet)
        self.run = run = dataclasses.replace(run, model=run.trained_model(data.vocab_size))
        if data.train is None:
            raise DataError("there is no training set", fix="--split with a first share above 0, or --train-data-path")
        self.data, self.train_set = data, data.train
        self._build(run)
        mesh = self.mesh
        self.metrics = on_all_ranks(lambda: Metrics(run, self.train_iters, mesh, quiet), mesh.world)
        self.graph = on_all_ranks(lambda: step_graph(run, mesh.device), mesh.world)
        self.profile = on_all_ranks(lambda: Profile(run.training, mesh.rank, mesh.device), mesh.world)
        self.memory = on_all_ranks(lambda: MemoryReport(run, mesh, self.model, self.optimizer), mesh.world)
        if run.training.log_memory_to_tensorboard:
            self.metrics.more_tags = self.memory.tags
        samples = self.batch_sizes.samples_of(self.train_iters)
        self.epochs = EpochLines(data.train, samples)
        self.metrics.say(describe_run(run, self.train_iters, self.batch_sizes))
        self.metrics.say(describe_data(run, data, data.train, samples))
        self.checkpoints = Checkpoints(run.checkpoint, mesh, self.metrics.say)
        self.checkpoints.begin(self)
        self._fit_to_data()

    def _build(self, run: RunConfig) -> None:
        """Random streams, model, DDP, optimizer, schedule."""
        mesh = self.mesh
        self.rng = RngStreams.on_mesh(run.training.seed, mesh)
        spec = spec_from_name(*run.spec, run.model) if run.spec else None
        model = build_model_chunks(run.model, mesh, run.training.seed, spec, self.rng)
        freeze(model, run.optimizer, mesh)
        self.model = data_parallel(model, mesh, run.optimizer.grad_dtype)
        self.optimizer = build_optimizer(
            run.optimizer,
            self.model,
            mesh,
            self.model.shards(),
            kernels=run.model.kernels,
            publish=self.model.start_param_gather,
        )
        schedule = functools.partial(rates_of, run.optimizer, run.training, self.batch_sizes)
        before = functools.partial(schedule, counted=False)
        self.scheduler = OptimizerParamScheduler(self.optimizer.param_groups, schedule(), before)

    def _samples_wanted(self, run: RunConfig, began: Mapping[str, Any] | None) -> tuple[int, int, int]:
        """Samples of the train, validation and test sets, as many as the run can use."""
        evaluated = began["counters"]["consumed_valid_samples"] if began else 0
        train, valid, test = self._samples_of(run, self.train_iters)
        return train, valid + evaluated if valid else 0, test

    def _samples_of(self, run: RunConfig, train_iters: int) -> tuple[int, int, int]:
        batch, training = self.batch_sizes.global_batch_size, run.training
        evaluations = train_iters // training.eval_interval + 1 if training.eval_interval else 0
        rounds = training.eval_iters * batch
        return train_iters * batch, evaluations * rounds, rounds if evaluations else 0

    def _joint(self, run: RunConfig, began: Mapping[str, Any] | None, wanted: tuple[int, int, int]) -> Joint:
        """Samples whose epochs are shuffled together, as the run began (`data/epochs`).

        Checkpoints that do not say it are of Megatron-LM or of an older version, and have its order of all samples of
        the run, which was as long as their weight decay might grow.
        """
        if began is None:
            return wanted if run.data.sample_order == "megatron" else (None, None, None)
        if "joint_samples" in began:
            train, valid, test = began["joint_samples"]
            return train, valid, test
        length = dataclasses.replace(run.training, train_samples=began["scheduler"]["wd_incr_steps"])
        return self._samples_of(run, iterations_of(length, self.batch_sizes))

    def train(self) -> TrainState:
        """Run to the end, or to the step after which a rank wants to stop.

        Raises:
            BadStep: a loss or gradient that is not finite, or a spike; on all ranks, nothing has moved
                (`--bad-step`).
            RankError: replicas differ (`check_replicas_interval`), or the first step is not that of one process
                (`check_first_step`).
        """
        training, state, stop, asked = self.run.training, self.state, False, False
        if training.check_first_step and state.iteration == 0:
            batch = self.batch_sizes.global_batch_size_at(0)
            self.metrics.say(check_first_step(self.run, self.mesh, self.train_set, batch, self.forward_step))
        self.batches = self._batches(self.train_set, state.consumed_train_samples)
        with StopSignal() as signalled:
            while (state := self.state).iteration < self.train_iters and not stop:
                self.profile.before_step(state.iteration)
                with self.memory.of_step(state.iteration + 1, self.metrics.say):
                    asked = stop = self._step(signalled.received or self._time_is_up())
                state = self.state  # after a rollback another one
                self.profile.after_step(state.iteration)
                if training.check_replicas_interval and state.iteration % training.check_replicas_interval == 0:
                    self._check_replicas()
                if training.eval_interval and state.iteration % training.eval_interval == 0:
                    self.evaluate("validation")
                stop = stop or bool(training.exit_interval and state.iteration % training.exit_interval == 0)
                self.checkpoints.after_step(self, ends=stop or state.iteration == self.train_iters)
        self.metrics.experts(self.history[-WINDOW:], state.iteration)
        if stop:
            reason = f"--exit-interval {training.exit_interval}"
            if asked:
                reason = "SIGTERM" if signalled.received else "the time is up on some rank, or SIGTERM reached it"
            self.metrics.say(f"exiting program at iteration {state.iteration}: {reason}")
        elif training.eval_interval:
            if state.iteration % training.eval_interval:
                self.evaluate("validation", "on validation set")
            self.evaluate("test", "on test set")
        return state

    def close(self) -> None:
        """Close log files, checkpoints and what is being profiled."""
        self.checkpoints.close()
        self.profile.close()
        self.memory.close()
        self.metrics.close()

    def _step(self, asks_to_stop: bool) -> bool:
        """One step and its bookkeeping; returns whether the run should end."""
        begun, state = time.perf_counter(), self.state
        first = state.consumed_train_samples
        batch_size = self.batch_sizes.global_batch_size_at(state.consumed_train_samples)
        try:
            report, stop = self._train_step(batch_size, asks_to_stop)
        except BadStep as error:
            self._after_bad_step(error, batch_size)
            return False
        state.iteration += 1
        state.validation_loss = None
        state.consumed_train_samples += batch_size
        state.skipped_iterations += report.skipped
        state.recent_losses = with_latest(state.recent_losses, report.losses)
        self.history.append(report)
        seconds = time.perf_counter() - begun
        if self.metrics.speaks:
            says = state.iteration % self.run.training.log_interval == 0
            for line in self.epochs.after_step(first, state.consumed_train_samples, state.iteration, says):
                self.metrics.say(line)
        self.metrics.step(report, state.iteration, state.consumed_train_samples, batch_size, seconds)
        return stop

    def _train_step(self, batch_size: int, asks_to_stop: bool) -> tuple[StepReport, bool]:
        training, state = self.run.training, self.state
        tokens = training.micro_batch_size * self.run.data.seq_length  # of a microbatch
        return train_step(
            self.forward_step,
            self.batches,
            self.model,
            self.optimizer,
            self.scheduler,
            self.mesh,
            self.batch_sizes.at(state.consumed_train_samples),
            StepOptions(
                batch_size=batch_size,
                loss_divisor=loss_divisor(self.run.model.dtype, tokens),
                asks_to_stop=asks_to_stop,
                forward_backward_fn=self.graph or get_forward_backward_fn(self.model),
                before_update=self._before_update,
            ),
        )

    def _before_update(self, losses: dict[str, float]) -> None:
        """The weights are about to move: they should, and what is being saved of them has been copied."""
        refuse_spike(losses, self.state.recent_losses, self.run.training.spiky_loss_factor)
        self.checkpoints.before_update()

    def _after_bad_step(self, error: BadStep, batch_size: int) -> None:
        """Nothing has moved: go on without the batch, from here or from the newest checkpoint (`bad_steps`)."""
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
        step = self.checkpoints.go_back(self, error)
        self.rollbacks[step] += 1
        if self.rollbacks[step] > ROLLBACKS:
            raise BadStep(error.what, fix=f"{ROLLBACKS} rollbacks to iteration {step} did not help: {error.fix}")
        self.state.consumed_train_samples = first + batch_size
        self._fit_to_data()
        self.batches = self._batches(self.train_set, self.state.consumed_train_samples)

    def _fit_to_data(self) -> None:
        """After rollbacks the dataset, made for so many steps, may not last for all of them."""
        state, size = self.state, self.batch_sizes.global_batch_size
        left = (len(self.train_set) - state.consumed_train_samples) // size
        if state.consumed_train_samples > state.iteration * size and state.iteration + left < self.train_iters:
            self.train_iters = state.iteration + left
            self.metrics.say(f"samples were left out: the run ends after iteration {self.train_iters}")

    def evaluate(self, split: str = "validation", where: str = "") -> dict[str, float]:
        """Losses of `eval_iters` global batches of a split, printed; {} where it is empty, or no label of it counts."""
        dataset = self.data.valid if split == "validation" else self.data.test
        rounds = self.run.training.eval_iters
        if dataset is None or rounds == 0:
            return {}
        consumed = self.state.consumed_valid_samples if split == "validation" else 0
        per_round = self.batch_sizes.global_batch_size // (self.run.training.micro_batch_size * self.mesh.dp.size)
        losses = evaluate(
            self.forward_step, self._batches(dataset, consumed), self.model, self.mesh, rounds * per_round
        )
        if split == "validation":
            self.state.consumed_valid_samples += rounds * self.batch_sizes.global_batch_size
            total = sum(losses.values())
            self.state.validation_loss = total if losses and math.isfinite(total) else None
        if losses:
            self.metrics.validation(losses, self.state.iteration, split, where)
        else:
            self.metrics.say(f"no {split} loss at iteration {self.state.iteration}: none of the labels counts")
        return losses

    def _batches(self, dataset: Dataset, consumed: int) -> Iterator[dict[str, torch.Tensor]]:
        return microbatches(dataset, self.run.training.micro_batch_size, self.mesh, consumed, self.mesh.device)

    def _check_replicas(self) -> None:
        """Compare every parameter with its copies on other ranks, and what each rank has moved its own part by."""
        world = self.mesh.world
        decided = {
            f"the {name} of the step": torch.tensor(value, dtype=torch.float64, device=self.mesh.device)
            for report in self.history[-1:]
            for name, value in report.decided().items()
        }
        with self.model.whole_weights():
            held = logical_parameters(self.model)
            copies = {n: (p, copy_axes(layout_of(p), self.mesh)) for n, p in held}
            check_copies({**copies, **{name: (value, [world]) for name, value in decided.items()}}, world)

    def _time_is_up(self) -> bool:
        minutes = self.run.training.exit_duration_in_mins
        return minutes is not None and time.monotonic() - self.started > 60 * minutes
