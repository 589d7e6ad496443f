"""Loss and perplexity on held-out text, or what else a task evaluates, without any effect on training.

An evaluation that draws one random number, leaves dropout off, or moves the training data by one sample would change
every step after it. So it has a data iterator of its own, draws nothing (dropout is off in eval mode), computes no
gradient, and puts every module back into its mode. It may be called between steps, or by an observer between the passes
of a step and its update. The mean is over tokens, not over batches:

    loss = sum over batches, dp, cp of sum_i m_i l_i  /  sum of m_i          perplexity = exp(loss)

One message of 8 * (2 per loss + 1) bytes over the world, at the end.

Megatron-LM: `evaluate` in `megatron/training/training.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from minimegatron import trace
from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.models.chunks import ModelChunks
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.training.datasets import RunData, microbatches
from minimegatron.training.microbatches import NumMicrobatches
from minimegatron.training.observers import Observer, Step
from minimegatron.training.observers.metrics import Metrics
from minimegatron.training.pipelined import forward_only
from minimegatron.training.reports import Sums, reduce_reports
from minimegatron.training.run_state import RunState
from minimegatron.training.step import ForwardStep
from minimegatron.training.task import Task


@torch.no_grad()
def evaluate(
    forward_step: ForwardStep,
    data_iterator: Iterator[Batch],
    model: DataParallel,
    num_microbatches: int,
) -> dict[str, float]:
    """Mean losses over `num_microbatches` of every rank; all ranks must call it.

    Args:
        forward_step: as in training.
        data_iterator: yields this rank's microbatches of the evaluated split.
        model: is in eval mode meanwhile.
        num_microbatches: forward passes of each rank.

    Returns:
        name -> mean over all counted tokens, equal on all ranks; losses without counted tokens are left out.
    """
    with eval_mode(model):
        totals = reduce_reports(forward_passes(forward_step, data_iterator, model, num_microbatches), model)
    return {name: loss for name, loss in totals.losses.items() if totals.counts[name]}


@contextlib.contextmanager
def eval_mode(model: DataParallel) -> Iterator[None]:
    """Inside, the model is in eval mode; then every module is back in its mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def forward_passes(
    forward_step: ForwardStep, data_iterator: Iterator[Batch], model: DataParallel, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Run the forward passes of this rank, without a pipeline or in one; returns its reports, name -> [sum, count]."""
    if isinstance(model.module, ModelChunks):
        reports = forward_only(forward_step, data_iterator, model, num_microbatches)
    else:
        sums = Sums(model.mesh.device)
        for _ in range(num_microbatches):
            output, summed = forward_step(data_iterator, model)
            sums.add(*summed(output)[1:])
        reports = sums.reports
    model.end_evaluation()
    return reports


class Evaluation(Observer):
    """Evaluates every `eval_interval` steps, and at the end of a complete run.

    Args:
        state: the run; its counters say how much of the validation set has been read.
        data: the sets.
        batch_sizes: batch sizes of the run; a round of an evaluation is a global batch.
        task: its loss, or an evaluation of its own (`training/task`).
        metrics: prints the losses.
    """

    def __init__(
        self,
        state: RunState,
        data: RunData,
        batch_sizes: NumMicrobatches,
        task: Task,
        metrics: Metrics,
    ) -> None:
        self.state, self.data, self.batch_sizes = state, data, batch_sizes
        self.task, self.metrics = task, metrics
        self.interval = state.run.training.eval_interval

    def after_step(self, step: Step) -> None:
        if self.interval and step.iteration % self.interval == 0:
            self.evaluate("validation")

    def end(self, done: int, reason: str) -> None:
        if reason or not self.interval:
            return
        if done % self.interval:
            self.evaluate("validation", "on validation set")
        self.evaluate("test", "on test set")

    def evaluate(self, split: str = "validation", where: str = "") -> dict[str, float]:
        """What the task finds, or losses of `eval_iters` global batches of a split, printed.

        Returns:
            Name -> value; {} if the split is empty, or no label of it counts.
        """
        dataset: Dataset | None = self.data.valid if split == "validation" else self.data.test
        counters, losses = self.state.counters, self.task.evaluate(split)
        if losses is None:
            if dataset is None or self.state.run.training.eval_iters == 0:
                return {}
            losses = self._losses(dataset, split)
        if split == "validation":
            score = self.task.score(losses)
            counters.validation_loss = score if losses and math.isfinite(score) else None
        if losses:
            self.metrics.validation(losses, counters.iteration, split, where)
        else:
            self.metrics.say(f"no {split} loss at iteration {counters.iteration}: none of the labels counts")
        return losses

    def _losses(self, dataset: Dataset, split: str) -> dict[str, float]:
        training, mesh, counters = self.state.run.training, self.state.mesh, self.state.counters
        rounds, micro, batch_size = training.eval_iters, training.micro_batch_size, self.batch_sizes.global_batch_size
        consumed = counters.consumed_valid_samples if split == "validation" else 0
        batches = microbatches(dataset, micro, mesh, consumed, mesh.device)
        num_microbatches = rounds * (batch_size // (micro * mesh.dp.size))
        batches = self.task.prepare(batches, num_microbatches)
        if split == "validation":
            counters.consumed_valid_samples += rounds * batch_size
        with trace.span("evaluation", "evaluation"):
            return evaluate(self.task.forward_step, batches, self.state.model, num_microbatches)
