"""Both executors: plain functions as stages, several tensors, headers, orders of messages, a failing stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError, RankError
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.param import Init
from minimegatron.layers.wgrad import add_to_grad
from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline import plain as pipeline
from minimegatron.parallel.pipeline.execution import FunctionStage, Specs, Tensors, TensorSpec
from minimegatron.parallel.pipeline.schedules import SCHEDULES, build_schedule, forward_only, gpipe, schedule_from_text
from minimegatron.parallel.pipeline.stage import ModuleStage
from tests.thorough import mostly_thorough

Run = Callable[..., None]
RUNS = [pytest.param(pipeline.run, id="plain"), pytest.param(overlapped.run, id="overlapped")]
EIGHT = TensorSpec(torch.Size([8]), torch.float32)
both_executors = pytest.mark.parametrize("run", RUNS)


def p2p_of(world: int, seconds: float = 30.0) -> PointToPoint:
    parallel = ParallelConfig(pipeline_model_parallel_size=world, distributed_timeout_seconds=seconds)
    return PointToPoint(Mesh.build(parallel))


def keep(rank: int, world: int, run: Run, name: str, m: int) -> int:
    """The most messages that were kept because they might still have been on their way."""
    schedule, p2p, most = build_schedule(name, world, m), p2p_of(world), [0]

    def look(*_: Any) -> torch.Tensor:
        most.append(p2p.pending_sends())
        return torch.zeros(8)

    stage = FunctionStage(look, look, hidden=EIGHT)
    run(schedule, [stage] * schedule.v, p2p)
    return max(most)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_sent_tensors_are_released_on_the_way(ranks, name):
    """The plain executor keeps all 32 and more; the overlapping one those that may not have arrived."""
    assert max(ranks(2).run(keep, overlapped.run, name, 32)) <= 8
    assert max(ranks(2).run(keep, pipeline.run, name, 32)) >= 31


# ------------------------------------------------------------------------------------ shapes


def uneven(rank: int, world: int, run: Run, m: int, name: str) -> list[Any]:
    """Microbatches of different lengths, sent with headers; the same as one process computes."""
    schedule, p2p = build_schedule(name, world, m), p2p_of(world)
    weights = [torch.full((), 2.0 + stage, requires_grad=True) for stage in range(schedule.stages)]
    mine = [weights[stage] for stage in schedule.placement[rank]]
    inputs = [torch.arange(1.0, 3.0 + i) for i in range(m)]

    def stage_of(chunk: int) -> ModuleStage:
        stage = schedule.stage_of(rank, chunk)
        last = stage == schedule.stages - 1

        def forward(i: int, x: Tensors | None) -> Tensors | torch.Tensor:
            y = (inputs[i] if x is None else x["hidden"]) * weights[stage]
            return y.sum() if last else {"hidden": y}

        return ModuleStage(forward, nn.Module(), schedule, rank, chunk)

    run(schedule, [stage_of(c) for c in range(schedule.v)], p2p)
    whole = torch.stack([w.detach() for w in weights]).prod() * sum(x.sum() for x in inputs)
    return [(w.grad.item(), (whole / w).item()) for w in mine]


@both_executors
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "dualpipe_v"])
def test_microbatches_of_different_lengths(ranks, name, run):
    for result in ranks(2).run(uneven, run, 6, name):
        for grad, want in result:
            assert grad == pytest.approx(want, rel=1e-6)


def another(rank: int, world: int, run: Run, length: int, dtype: torch.dtype) -> None:
    stage = FunctionStage(lambda i, x: torch.zeros(4), hidden=TensorSpec(torch.Size([length]), dtype))
    run(forward_only(world, 2), [stage], p2p_of(world))


@both_executors
@pytest.mark.parametrize(
    ("length", "dtype", "fix"), [(5, torch.float32, "variable_seq_lengths"), (4, torch.bfloat16, "return the dtype")]
)
def test_an_output_of_another_shape_or_dtype_is_refused_where_it_is_made(ranks, run, length, dtype, fix):
    with pytest.raises(RankError, match=rf"(?s)stage 0 made \[4\] in torch.float32.*{fix}"):
        ranks(2).run(another, run, length, dtype, timeout=20)


def no_gradient(rank: int, world: int, run: Run) -> None:
    stage = FunctionStage(lambda i, x: torch.zeros(4))
    run(gpipe(world, 2), [stage], p2p_of(world))


@both_executors
def test_a_stage_without_a_gradient_is_named(ranks, run):
    with pytest.raises(RankError, match="stage 1 returned no gradient of its input at B0"):
        ranks(2).run(no_gradient, run, timeout=20)


def test_deferred_gradients_add_up():
    weight = torch.nn.Parameter(torch.zeros(2))
    for value in (1.0, 2.0):
        add_to_grad(weight, torch.full((2,), value))
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]


@both_executors
def test_one_rank_needs_no_messages(run):
    done = []
    stage = FunctionStage(lambda i, x: done.append(f"F{i}"), lambda i, dy: done.append(f"B{i}"))
    run(gpipe(1, 2), [stage])
    assert done == ["F0", "F1", "B0", "B1"]
    with pytest.raises(ConfigError, match="is for 2 ranks"):
        run(gpipe(2, 2), [stage])


@both_executors
def test_stages_on_one_rank_pass_their_tensors_directly(run):
    schedule = forward_only(1, 3, ((0, 1, 2),))
    seen: list[float] = []
    ends = FunctionStage(lambda i, x: torch.tensor(float(i)))
    middle = FunctionStage(lambda i, x: x + 10)
    last = FunctionStage(lambda i, x: seen.append(float(x)))
    run(schedule, [ends, middle, last])
    assert seen == [10.0, 11.0, 12.0]


def reversed_order(rank: int, world: int, run: Run, hidden: TensorSpec) -> list[float]:
    """Rank 1 begins with the microbatch that rank 0 sends last: what is received before is kept."""
    schedule = schedule_from_text("reversed", ["F0 F1 F2 B0 B1 B2", "F2 F1 F0 B2 B1 B0"])
    seen: list[float] = []

    def look(i: int, x: torch.Tensor | None) -> torch.Tensor:
        seen.extend([] if x is None else [i, x.item()])
        return torch.tensor([10.0 * rank + i])

    run(schedule, [FunctionStage(look, look, hidden=hidden)], p2p_of(world))
    return seen


@both_executors
@pytest.mark.parametrize("hidden", [TensorSpec(torch.Size([1]), torch.float32), TensorSpec()], ids=["known", "headers"])
def test_messages_that_are_needed_in_another_order_than_they_are_sent(ranks, run, hidden):
    assert ranks(2).run(reversed_order, run, hidden) == [[0, 10, 1, 11, 2, 12], [2, 2, 1, 1, 0, 0]]


H, M = 4, 6


class Layer(nn.Module):
    """A stage that reads a memory beside its hidden state, as a decoder with an encoder's output does."""

    def __init__(self, stage: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        axis = Mesh.serial().tp  # a layer of ours: a split backward pass defers its gradient
        self.of_hidden, self.of_memory = (
            ColumnParallelLinear(H, H, axis, init=Init(), bias=False, dtype=dtype) for _ in range(2)
        )
        torch.manual_seed(stage)
        for param in self.parameters():
            nn.init.normal_(param)

    def forward(self, x: Tensors, last: bool) -> Tensors | torch.Tensor:
        memory = torch.tanh(self.of_memory(x["memory"]))
        hidden = torch.tanh(self.of_hidden(x["hidden"]) + memory.mean(0) + x["shift"][:, None])
        if last:
            return hidden.sum() + memory.square().sum()
        return {"shift": x["shift"], "hidden": hidden, "memory": memory}


def first_input(microbatch: int) -> Tensors:
    g = torch.Generator().manual_seed(microbatch)
    n = 3 + microbatch % 2
    hidden, memory = torch.randn(n + 5, H, generator=g, dtype=torch.float64).split([n, 5])
    return {"hidden": hidden, "memory": memory, "shift": torch.arange(n) % 2}


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def one_process(stages: int) -> list[list[torch.Tensor]]:
    layers = [Layer(stage) for stage in range(stages)]
    for i in range(M):
        x: Any = first_input(i)
        for stage, layer in enumerate(layers):
            x = layer(x, stage == stages - 1)
        x.backward()
    return [grads(layer) for layer in layers]


def between(known: bool) -> Specs:
    """The memory's shape is always the same, the others' is not; of integers the dtype is always said."""
    memory = TensorSpec(torch.Size([5, H]), torch.float64) if known else TensorSpec()
    return {"memory": memory, "shift": TensorSpec(None, torch.int64), "hidden": TensorSpec()}


def two_tensors(rank: int, world: int, run: Any, name: str) -> list[tuple[int, list[torch.Tensor]]]:
    schedule = build_schedule(name, world, M)
    p2p = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
    layers = {stage: Layer(stage) for stage in schedule.placement[rank]}

    def stage_of(chunk: int, stage: int) -> ModuleStage:
        def forward(i: int, x: Tensors | None) -> Tensors | torch.Tensor:
            return layers[stage](first_input(i) if x is None else x, stage == schedule.stages - 1)  # type: ignore[no-any-return]

        specs = between(known=stage % 2 == 0), between(known=stage % 2 == 1)
        return ModuleStage(forward, layers[stage], schedule, rank, chunk, inputs=specs[0], outputs=specs[1])

    run(schedule, [stage_of(c, stage) for c, stage in enumerate(schedule.placement[rank])], p2p)
    assert p2p.pending_sends() == 0
    return [(stage, grads(layer)) for stage, layer in layers.items()]


CASES = [(name, run) for name in sorted(SCHEDULES) for run in (overlapped.run, pipeline.run)]


@pytest.mark.parametrize("name, run", mostly_thorough(CASES, lambda case: case[1] is overlapped.run))
def test_every_gradient_is_that_of_one_process(ranks, name, run):
    found = dict(part for rank in ranks(2).run(two_tensors, run, name) for part in rank)
    for stage, want in enumerate(one_process(len(found))):
        for a, b in zip(found[stage], want, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()


def forgotten(rank: int, world: int) -> None:
    schedule = build_schedule("1f1b", world, M)
    p2p = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))

    def forward(i: int, x: Tensors | None) -> Tensors:
        return {"hidden": first_input(i)["hidden"]}

    stage = ModuleStage(forward, nn.Module(), schedule, rank, outputs=between(known=True))
    overlapped.run(schedule, [stage], p2p)


def test_a_tensor_that_is_not_made_is_named(ranks):
    said = r"stage 0 made hidden at F0.0, and says that it makes memory, shift, hidden"
    with pytest.raises(RankError, match=said):
        ranks(2).run(forgotten, timeout=20)
