"""Both executors: plain functions as stages, headers, a failing stage, and torch's own pipeline beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError, RankError
from minimegatron.layers.wgrad import add_to_grad
from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline import plain as pipeline
from minimegatron.parallel.pipeline.execution import FunctionStage, Tensors, TensorSpec
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.parallel.pipeline.schedules import build_schedule, forward_only, gpipe, schedule_from_text
from minimegatron.parallel.pipeline.stage import ModuleStage
from tests.thorough import mostly_thorough

Run = Callable[..., None]
RUNS = [pytest.param(pipeline.run, id="plain"), pytest.param(overlapped.run, id="overlapped")]
EIGHT = TensorSpec(torch.Size([8]), torch.float32)
both_executors = pytest.mark.parametrize("run", RUNS)


def p2p_of(world: int, seconds: float = 30.0) -> PointToPoint:
    parallel = ParallelConfig(pipeline_model_parallel_size=world, distributed_timeout_seconds=seconds)
    return PointToPoint(Mesh.build(parallel))


# ------------------------------------------------------------------------------------ sleeping stages


def sleep_through(rank: int, world: int, run: Run, name: str, m: int, unit: float) -> tuple[float, float]:
    schedule, p2p = build_schedule(name, world, m), p2p_of(world)
    back = unit if schedule.splits else 2 * unit
    share = unit / schedule.v

    def work(seconds: float) -> torch.Tensor:
        time.sleep(seconds / schedule.v)
        return torch.zeros(8)

    stage = FunctionStage(lambda i, x: work(unit), lambda i, dy: work(back), lambda i: time.sleep(share), EIGHT)
    run(schedule, [stage] * schedule.v, p2p)  # connections and imports
    with trace.record(rank) as log:
        run(schedule, [stage] * schedule.v, p2p)
    actions = [e for e in log.events if e.name in ("F", "B", "W")]
    return min(e.start for e in actions), max(e.end for e in actions)


SLEEPING = [
    (name, 8, run) for name in ("gpipe", "1f1b", "interleaved", "zb_h1") for run in (pipeline.run, overlapped.run)
]


@pytest.mark.parametrize("name, m, run", mostly_thorough(SLEEPING, [0, 3, 4, 7]))
def test_sleeping_stages_are_never_faster_than_the_simulator_says(ranks, name, m, run):
    """No rank runs ahead of what it needs. How much slower they are is measured in `benchmarks/bubble.py`."""
    unit = 0.02
    spans = ranks(4).run(sleep_through, run, name, m, unit)
    measured = max(end for _, end in spans) - min(start for start, _ in spans)
    schedule = build_schedule(name, 4, m)
    predicted = float(simulate(schedule, Costs()).makespan) * unit / schedule.v
    assert measured >= predicted


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


def frozen(rank: int, world: int, run: Run) -> float:
    layer = nn.Linear(3, 3).requires_grad_(rank == 1)
    schedule = build_schedule("1f1b", world, 2)

    def forward(i: int, x: Tensors | None) -> Tensors | torch.Tensor:
        return {"hidden": layer(torch.ones(3))} if x is None else layer(x["hidden"]).sum()

    run(schedule, [ModuleStage(forward, layer, schedule, rank)], p2p_of(world))
    return sum(float(p.grad.abs().sum()) for p in layer.parameters() if p.grad is not None)


@both_executors
def test_a_frozen_first_stage(ranks, run):
    first, last = ranks(2).run(frozen, run)
    assert first == 0.0 < last


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


# ------------------------------------------------------------------------------------ torch's pipeline


def beside_torch(rank: int, world: int, run: Run, name: str, m: int) -> float:
    """The largest difference of any gradient between torch.distributed.pipelining and the executor; 0 expected."""
    from torch.distributed import pipelining

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(world)]
    x, target = torch.randn(3 * m, 6), torch.randn(3 * m, 6)

    def loss_of(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (y - t).square().sum()

    def grads() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in layers[rank].parameters()]
        layers[rank].zero_grad()
        return found

    stage = pipelining.PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[name]
    theirs = kind(stage, m, loss_fn=loss_of, scale_grads=False)
    arguments, options = ((x,) if rank == 0 else ()), ({"target": target} if rank == world - 1 else {})
    theirs.step(*arguments, **options)
    want = grads()

    schedule = build_schedule(name, world, m)
    inputs, targets = x.chunk(m), target.chunk(m)

    def forward(i: int, h: Tensors | None) -> Tensors | torch.Tensor:
        y = layers[rank](inputs[i] if h is None else h["hidden"])
        return loss_of(y, targets[i]) if rank == world - 1 else {"hidden": y}

    run(schedule, [ModuleStage(forward, layers[rank], schedule, rank)], p2p_of(world))
    return max((a - b).abs().max().item() for a, b in zip(grads(), want, strict=True))


@both_executors
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gradients_are_those_of_torch_pipelining(ranks, name, run):
    assert ranks(2).run(beside_torch, run, name, 4) == [0.0, 0.0]
