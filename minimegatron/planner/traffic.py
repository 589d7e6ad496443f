"""Every communication of a training step on one rank: how often, over which axis, and how many bytes.

| from                           | messages                                                                        |
|--------------------------------|---------------------------------------------------------------------------------|
| a run of the stage's layers    | sums and gathers over tp, rings over cp, tokens to experts; each microbatch     |
| the schedule's list of actions | activations and gradients to neighbours over pp                                 |
| buckets of the wrapper         | gradients; weights after the step (ZeRO-1, -2) or when they are used (ZeRO-3)   |
| layouts of parameters          | gradients of norms over tp, of a tied embedding over embd                       |
| hooks of the step, run         | loads of experts, FP8 amax                                                      |
| the step itself                | token counts, losses, the gradient norm; messages of the optimizer (`update`)   |

The model and its wrapper are built on torch's `meta` device, so buckets, shards and padding are those of the run.
A step that is traced (`trace.record`) counts the same calls and bytes; tests compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minimegatron.comm import async_ops
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.transport import FakeTransport
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.footprint.dry_run import Sizes
from minimegatron.footprint.events import Message, Sent, Waited, require_known
from minimegatron.footprint.kinds import StageRun, one_of_each
from minimegatron.footprint.prediction import actions_of, sizes_of
from minimegatron.footprint.recorder import Messages
from minimegatron.footprint.states import planned_model
from minimegatron.layers.param import layout_of
from minimegatron.layers.step_hooks import StepHooks
from minimegatron.models.chunks import ModelChunks, schedule_of
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.finalize import partial_axes
from minimegatron.parallel.data.grad_buffer import Bucket, GradBuffer
from minimegatron.parallel.data.units import units_of
from minimegatron.parallel.pipeline.actions import Action
from minimegatron.planner.update import update_messages
from minimegatron.training.memory_report import spec_of, work_of_run

Traffic = Counter[tuple[Message, str]]  # a message and its part of the step -> how often


def run_messages(run: RunConfig, rank: int, world: int, device: str = "cuda") -> Traffic:
    """All messages of one rank of a run in a step.

    Raises:
        ConfigError: the layout is not possible.
        Unpredicted: a feature sends messages that a plan does not know.
    """
    config, parallel, optimizer = run.model, run.parallel, run.optimizer
    require_known(not optimizer.freeze and config.lora_rank is None, "messages of a model with frozen parameters")
    mesh, work = Mesh.planned(parallel, rank, world), work_of_run(run, world, device)
    ddp = planned_model(config, mesh, optimizer, spec_of(run))
    z = sizes_of(config, mesh, optimizer, work, spec_of(run))
    found = step_messages(plan_stages(parallel, config.num_layers), ddp, z, work.microbatches)
    found.update((m, "optimizer") for m in update_messages(ddp, optimizer))
    return found


def step_messages(plan: StagePlan, ddp: DistributedDataParallel, z: Sizes, microbatches: int) -> Traffic:
    """{(message, part of the step): how often} in one step of this rank, without those of the optimizer."""
    found, row = messages_around(plan, ddp, z, microbatches), actions_of(plan, z, microbatches)
    runs = [StageRun(stage, z) for stage in stages_of(ddp)]
    for action in (one for one in row if one.kind != "W"):
        passes = "forward" if action.kind == "F" else "backward"
        for message, count in runs[action.chunk].messages(action.kind == "B").items():
            found[message, passes] += count
    found.update((m, "pipeline") for m in pipeline_messages(plan, z, microbatches))
    for run in runs:
        for message, count in run.messages_once().items():
            found[message, "end of step"] += count
    return found


def messages_around(plan: StagePlan, ddp: DistributedDataParallel, z: Sizes, microbatches: int) -> Traffic:
    """The messages of `step_messages` that no forward or backward pass sends; they are known without running layers."""
    found: Traffic = Counter()
    stages, row = stages_of(ddp), actions_of(plan, z, microbatches)
    split = {(a.microbatch, a.chunk) for a in row if a.kind == "W"}
    for action in row:
        if action.kind == "W" or action.kind == "B" and (action.microbatch, action.chunk) not in split:
            found.update((m, "shards") for m in _temporary(ddp, stages[action.chunk]))
    found.update((m, "gradients") for m in gradient_messages(ddp))
    when = "weights on use" if ddp.sharding == "optim_grads_params" else "weights"
    found.update((m, when) for m in weight_messages(ddp, row))
    found.update((m, "end of step") for m in end_messages(ddp, z))
    return found


def stages_of(ddp: DistributedDataParallel) -> list[Any]:
    """The stages of this rank."""
    return [stage for _, stage in ddp.module.stages()] if isinstance(ddp.module, ModelChunks) else [ddp.module]


def pipeline_messages(plan: StagePlan, z: Sizes, microbatches: int) -> Iterator[Message]:
    """Messages between pipeline stages, sent and received, from the list of actions."""
    if plan.ranks == 1:
        return
    schedule, rank = schedule_of(plan, z.mesh.parallel, microbatches), z.mesh.pp.rank
    for action in schedule.actions[rank]:
        arriving = schedule.input_of(rank, action)
        if arriving is not None and schedule.source_of(arriving) != rank:
            yield Message("recv", "pp", z.stream)
        if schedule.message_of(rank, action) is not None:
            yield Message("send", "pp", z.stream)


def _temporary(ddp: DistributedDataParallel, stage: Any) -> Iterator[Message]:
    """Gradient buckets that are reduced after every backward pass (ZeRO-2 and -3)."""
    names = {ddp.name_of(p) for p in stage.parameters() if p.requires_grad}
    for buffer in ddp.grad_buffers:
        for bucket in buffer.buckets if buffer.temporary else ():
            if not names.isdisjoint(bucket.members):
                yield from _over(buffer.axis, "reduce_scatter", bucket.span.size * buffer.data.element_size())


def gradient_messages(ddp: DistributedDataParallel) -> Iterator[Message]:
    """Gradient buckets that are reduced once a step, and the sums over groups of replicas."""
    name = "all_reduce" if ddp.sharding == "no_shard" else "reduce_scatter"
    for buffer in ddp.grad_buffers:
        element = buffer.data.element_size()
        for bucket in buffer.buckets if not buffer.temporary else ():
            yield from _over(buffer.axis, name, bucket.span.size * element)
            yield from _over(buffer.instances, "all_reduce", bucket.span.size // buffer.axis.size * element)
        if buffer.temporary:
            yield from _over(buffer.instances, "all_reduce", buffer.data.numel() * element)


def weight_messages(ddp: DistributedDataParallel, row: Iterable[Action]) -> Iterator[Message]:
    """All-gathers of weights: every bucket after the step, or each unit's for its forward and for its backward pass."""
    home = {
        name: (buffer, bucket) for buffer in ddp.grad_buffers for bucket in buffer.buckets for name in bucket.members
    }
    if ddp.sharding in ("optim", "optim_grads"):
        yield from _gathers(home.values())
    if ddp.sharding != "optim_grads_params":
        return
    units, alone = units_of(ddp.module), ddp.mesh.pp.size == 1
    require_known(not any(unit.borrowed for unit in units), "ZeRO-3's gathers of what two stages of a rank share")
    for action in row:
        for unit in (u for u in units if u.stage == action.chunk and action.kind != "W"):
            if not (action.kind == "B" and alone and not unit.in_list):  # it has stayed since the forward pass
                yield from _gathers(home[ddp.name_of(p)] for p in unit.params if p.requires_grad)


def _gathers(buckets: Iterable[tuple[GradBuffer, Bucket]]) -> Iterator[Message]:
    """One all-gather of the weights of each bucket."""
    for buffer, bucket in {id(bucket): (buffer, bucket) for buffer, bucket in buckets}.values():
        element = buffer.params[next(iter(bucket.members))].element_size()
        yield from _over(buffer.axis, "all_gather", bucket.span.size * element)


def end_messages(ddp: DistributedDataParallel, z: Sizes) -> Iterator[Message]:
    """Messages at the end of a step: gradients of replicated and tied parameters, token counts, losses, the gradient
    norm, and
    the messages of hooks (`layers/step_hooks`), which are run."""
    mesh, params, axes = ddp.mesh, ddp.params, partial_axes(ddp.mesh)
    flat: Counter[str] = Counter()
    for name, shard in ddp.shards().items():
        layout, nbytes = layout_of(params[name]), shard.grad.numel() * shard.grad.element_size()
        axis = axes[layout.partial]
        if axis is not None:
            flat[axis.name] += nbytes
        if layout.copies:
            yield from _over(mesh.axis(layout.copies), "all_reduce", nbytes)
    for axis_name, nbytes in flat.items():
        yield from _over(mesh.axis(axis_name), "all_reduce", nbytes)
    yield from (m for axis in (mesh.dp_cp, mesh.pp) for m in _over(axis, "all_reduce", 8))  # tokens
    yield from (sent.message for sent in _of_hooks(ddp, mesh)[1])
    losses = 1 + len(_of_hooks(one_of_each(z.config, mesh, z.spec), mesh)[0])  # as the last stage reports them
    yield from _over(mesh.world, "all_reduce", 8 * (2 * losses + 1 + (mesh.pp.size > 1)))  # sums and counts, flags
    yield from _over(mesh.world, "all_reduce", 24)  # norm, zeros, tensors that are not finite


def _of_hooks(model: nn.Module, mesh: Mesh) -> tuple[dict[str, torch.Tensor], list[Sent]]:
    """What the hooks of a step report, and the messages that they send."""
    sent: list[Sent | Waited] = []
    hooks = StepHooks(model, mesh)
    with async_ops.alone(FakeTransport(), Messages(sent.append)), hooks.passes(1.0):
        pass
    with async_ops.alone(FakeTransport(), Messages(sent.append)):
        reports = hooks.reports()
        hooks.tables()
        hooks.end_step()
    return reports, [one for one in sent if isinstance(one, Sent)]


def _over(axis: Axis, name: str, nbytes: int) -> Iterator[Message]:
    if axis.size > 1:
        yield Message(name, axis.name, nbytes)
