"""Forward and backward of a whole step, or of an evaluation, when the model is cut into pipeline stages.

The problem in a sentence: the loss is known on the last stage, the tokens enter on the first, and the stages in between
have neither; yet every stage needs the masks and the positions of the microbatch whose activation it is given.

So every rank of a pipeline reads the microbatches of its data-parallel rank (ids are small beside activations), keeps
each from its first use until the last of its stages has run it, and hands it to the same `forward_step` as without a
pipeline. The output of the stage before arrives through `set_input_tensor`; what `forward_step` returns goes to the
stage after. Only the last stage calls the loss function. Token counts and losses are added up there; the other stages
contribute zeros to the sums over all ranks (`finalize_model_grads`, `reduce_reports`).

The schedule decides the order of the work, and `parallel/pipeline/overlapped` executes it. A bucket of gradients starts
to travel over the data-parallel ranks in the action that completes it (`parallel/pipeline/stage.last_gradients`).

Megatron-LM: `get_forward_backward_func`, `forward_step` and `backward_step` in
`megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.data.gpt_dataset import Batch
from minimegatron.errors import ConfigError
from minimegatron.models.chunks import ModelChunks
from minimegatron.models.contract import ModelStage
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline.execution import Tensors
from minimegatron.parallel.pipeline.schedules import Schedule
from minimegatron.parallel.pipeline.stage import Forward, ModuleStage, last_gradients
from minimegatron.training.reports import Sums


class Microbatches:
    """The microbatches of a step, each kept from its first use to its last.

    Args:
        iterator: yields them in order.
        uses: how many times each is asked for.
    """

    def __init__(self, iterator: Iterator[Batch], uses: int) -> None:
        self._iterator = iterator
        self._uses = uses
        self._read = 0
        self._kept: dict[int, Batch] = {}
        self._left: Counter[int] = Counter()

    def peek(self, index: int) -> Batch:
        """A microbatch, without counting the use."""
        while self._read <= index:
            self._kept[self._read], self._left[self._read] = next(self._iterator), self._uses
            self._read += 1
        return self._kept[index]

    def take(self, index: int) -> Batch:
        """A microbatch; it is dropped after its last use."""
        batch = self.peek(index)
        self._left[index] -= 1
        if self._left[index] == 0:
            del self._kept[index], self._left[index]
        return batch


def forward_backward(
    forward_step: Any,
    data_iterator: Iterator[Batch],
    model: DataParallel,
    num_microbatches: int,
    scale: Callable[[torch.Tensor], torch.Tensor],
    schedule: Schedule | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Accumulate the gradients of all microbatches; every rank of the pipeline calls it.

    Args:
        forward_step, data_iterator, num_microbatches, scale: as in `training.step.forward_backward`.
        model: wraps `ModelChunks`.
        schedule: another order of work than the configured one; its placement must be that of the model.

    Returns:
        Token count and reports of this rank: those of its microbatches on the last stage, zero and {} elsewhere.

    Raises:
        ConfigError: the schedule cannot run here; nothing has.
    """
    chunks = _chunks(model)
    if schedule is None:
        sums = _run(chunks.schedule(num_microbatches), forward_step, data_iterator, model, scale)
    else:
        _require_fits(schedule, chunks, num_microbatches)
        sums = _run(schedule, forward_step, data_iterator, model, scale, checked=False)
    return sums.tokens, sums.reports


@torch.no_grad()
def forward_only(
    forward_step: Any, data_iterator: Iterator[Batch], model: DataParallel, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Reports of an evaluation; {} except on the last stage."""
    return _run(_chunks(model).evaluation(num_microbatches), forward_step, data_iterator, model).reports


def _run(
    schedule: Schedule,
    forward_step: Any,
    data_iterator: Iterator[Batch],
    model: DataParallel,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    checked: bool = True,
) -> Sums:
    """Run the schedule over this rank's stages of the model."""
    chunks, rank = _chunks(model), model.mesh.pp.rank
    batches, sums = Microbatches(data_iterator, len(chunks.chunks)), Sums(model.mesh.device)
    ddp = None if schedule.forward_only else model
    last = last_gradients(schedule, rank, list(chunks.chunks), model)
    b, s = batches.peek(0)["tokens"].shape
    stages = []
    for number, (_, chunk) in enumerate(chunks.stages()):
        inputs, outputs = chunk.stage_specs(b, s, model.compute_dtype)
        forward = _forward_of(forward_step, chunk, batches, sums, scale)
        stages.append(ModuleStage(forward, chunk, schedule, rank, number, ddp, last[number], inputs, outputs))
    overlapped.run(schedule, stages, chunks.mail, checked=checked)
    return sums


def _forward_of(
    forward_step: Any,
    chunk: ModelStage,
    batches: Microbatches,
    sums: Sums,
    scale: Callable[[torch.Tensor], torch.Tensor],
) -> Forward:
    """A stage's forward: its output for the next stage, or on the last stage the scaled loss."""

    def forward(microbatch: int, x: Tensors | None) -> Tensors | torch.Tensor:
        chunk.set_input_tensor(x)
        output, summed = forward_step(iter((batches.take(microbatch),)), chunk)
        if not chunk.post_process:
            return output  # type: ignore[no-any-return]
        loss, num_tokens, report = summed(output)
        sums.add(num_tokens, report)
        return scale(loss)

    return forward


def _chunks(model: DataParallel) -> ModelChunks:
    assert isinstance(model.module, ModelChunks), "a pipeline needs stages: models.chunks.build_model_chunks"
    return model.module


def _require_fits(schedule: Schedule, chunks: ModelChunks, num_microbatches: int) -> None:
    if schedule.placement != chunks.placement:
        raise ConfigError(
            f"schedule `{schedule.name}` puts stages {schedule.placement}, the model has them at {chunks.placement}",
            fix="build the model for this placement: pipeline_schedule, or ModelChunks(placement=...)",
        )
    if schedule.m != num_microbatches:
        raise ConfigError(
            f"schedule `{schedule.name}` is for {schedule.m} microbatches, the step has {num_microbatches}",
            fix="build it for as many",
        )
