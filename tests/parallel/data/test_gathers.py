"""Weights that are gathered when they are used: the order of events, parts out of order, units in the trace."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from minimegatron import trace
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import Work
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.inference.generate import generate
from minimegatron.models.decoder import build_model
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data import param_buffer
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.units import leaves_of, units_in_trace, units_of
from minimegatron.parallel.data.zero import Zero3
from tests.thorough import SLOW, mostly_thorough
from tests.twin import Case, accumulate, microbatch, parallel_model, serial_backward, serial_model

ADAM = OptimizerConfig(lr=1e-2)


class OutOfOrder(nn.Module):
    """Runs its parts in another order than they are registered in, the last of them only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))  # each waits for its own weights

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        a, b, c, rarely = self.layers
        x = a(torch.tanh(c(torch.tanh(b(x)))))
        return rarely(x) if seldom else x


class LastMoment:
    """`param_buffer.all_gather_start` on the slowest network there may be: a message has read its input when it starts,
    and writes its output when it is waited for, or at last when the next message starts."""

    def __init__(self) -> None:
        self._real = param_buffer.all_gather_start
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, shard: torch.Tensor, axis: Axis, output: torch.Tensor) -> Work:
        self.arrive(None)
        whole = self._real(shard.clone(), axis).wait()
        self._under_way.append((output, whole))
        work = Work(output)
        work.wait = lambda: self.arrive(whole)  # type: ignore[assignment, method-assign]
        return work

    def arrive(self, last: torch.Tensor | None) -> None:
        """Messages arrive in the order in which they were sent: up to this one, if it is under way, or all."""
        sent = [whole.data_ptr() for _, whole in self._under_way]
        if last is not None and last.data_ptr() not in sent:
            return
        for _ in range(len(sent) if last is None else sent.index(last.data_ptr()) + 1):
            output, whole = self._under_way.pop(0)
            output.copy_(whole)


def run_out_of_order(rank: int, world: int, sharding: str, late: bool) -> tuple[list[torch.Tensor], list[int], int]:
    """Outputs of six steps and of all parts after the last; gathers that a step has begun; buckets."""
    mesh = Mesh.build(ParallelConfig())
    ddp = DistributedDataParallel(OutOfOrder(), mesh, 1, sharding=sharding, overlap_param_gather=late)
    optimizer = build_optimizer(ADAM, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(rank))
    found, begun = [], []
    with mock.patch.object(param_buffer, "all_gather_start", LastMoment()):
        for step in range(6):
            ddp.zero_grad_buffer()
            with trace.record(rank) as log:
                y = ddp(x, seldom=step == 4)
                with ddp.backward_pass():
                    y.square().sum().backward()
                ddp.finish_grad_sync()
            begun.append(log.count("all_gather"))
            optimizer.step()
            found.append(y.detach())
        with torch.no_grad():
            return [*found, ddp(x, seldom=True)], begun, sum(len(b.layout.buckets) for b in ddp.grad_buffers)


@pytest.mark.parametrize("sharding", mostly_thorough(["optim", "optim_grads"], [1]))
def test_parts_that_run_out_of_order_or_seldom_have_their_weights(ranks: Any, sharding: str) -> None:
    """A message that still wrote into a bucket when the optimizer does would bring back what the weights were."""
    plain = ranks(2).run(run_out_of_order, "no_shard", False)
    for (want, _, _), (got, begun, buckets) in zip(plain, ranks(2).run(run_out_of_order, sharding, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert begun == [0, *[buckets - 1] * 5], "the first begins right after the step before"


# -------------------------------------------------------------------------------------------- the order of events


class Recorded:
    """`param_buffer.all_gather_start` that notes ("start", unit) and ("wait", unit)."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.events: list[tuple[str, int]] = []
        assert isinstance(ddp.strategy, Zero3)
        self._unit = {b.shard.data_ptr(): i for i, (_, mine, _) in enumerate(ddp.strategy.gathers.units) for b in mine}
        self._real = param_buffer.all_gather_start

    def __call__(self, shard: torch.Tensor, *where: Any) -> Any:
        unit, work = self._unit[shard.data_ptr()], self._real(shard, *where)
        self.events.append(("start", unit))
        waits = work.wait

        def wait() -> torch.Tensor:
            self.events.append(("wait", unit))
            return waits()

        work.wait = wait  # type: ignore[method-assign]
        return work


def events_of_a_microbatch(rank: int, world: int, model: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """[forward, backward]: what is gathered and computed, in order; unit 0 is what is in no layer."""
    case = Case({}, {"num_layers": 3, **model}, sharding="optim_grads_params")
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    assert isinstance(ddp, DistributedDataParallel)
    record = Recorded(ddp)
    note = record.events.append
    for unit, layer in enumerate(units_of(ddp.module)):
        layer.module.register_forward_pre_hook(lambda *_, u=unit: note(("begin", u)))
        layer.module.register_forward_hook(lambda *_, u=unit: note(("end", u)))
        if layer.in_list:  # its gradient is the last of the layer
            layer.module.input_layernorm.weight.register_post_accumulate_grad_hook(lambda _, u=unit: note(("end", u)))
    batch = microbatch(case, rank, 0)
    with mock.patch.object(param_buffer, "all_gather_start", record):
        loss = (ddp(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
        forward = list(record.events)
        record.events.clear()
        with ddp.backward_pass():
            loss.backward()
    return [forward, list(record.events)]


def test_every_gather_but_the_first_travels_while_a_layer_computes(ranks: Any) -> None:
    """The gather of unit k + 1 begins before unit k computes, and is waited for afterwards."""
    for forward, backward in ranks(2).run(events_of_a_microbatch, {}):
        outside = [e for e in forward if e[1] == 0 and e[0] != "end"]
        assert set(outside[:-1]) == {("start", 0), ("wait", 0)} and outside[-1] == ("begin", 0)
        layers = [e for e in forward if e[1] != 0]
        assert layers == [
            ("start", 1), ("wait", 1), ("start", 2), ("begin", 1), ("end", 1),
            ("wait", 2), ("start", 3), ("begin", 2), ("end", 2), ("wait", 3), ("begin", 3), ("end", 3),
        ]  # fmt: skip
        assert forward.index(("start", 1)) < forward.index(("begin", 0)), "while the embedding computes"
        assert backward == [
            ("start", 3), ("wait", 3), ("start", 2), ("end", 3), ("wait", 2), ("start", 1), ("end", 2),
            ("wait", 1), ("end", 1),
        ]  # fmt: skip


def test_recomputed_layers_gather_nothing_more(ranks: Any) -> None:
    """Layers that are computed again are on the way back: what comes next is the layer before."""
    plain = ranks(2).run(events_of_a_microbatch, {})
    again = ranks(2).run(events_of_a_microbatch, {"recompute_granularity": "full"})
    for one, other in zip(plain, again, strict=True):
        for a, b in zip(one, other, strict=True):
            assert [e for e in a if e[0] == "start"] == [e for e in b if e[0] == "start"]


def gathered_in_a_pipeline(rank: int, world: int, case: Case) -> tuple[int, int, int]:
    """Elements that a step gathers; those of the layers here, and of what is in no layer."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    assert isinstance(ddp, DistributedDataParallel)
    with trace.record(rank) as log:
        accumulate(ddp, case, mesh)
    layers = [any("layers" in name for name in bucket.members) for bucket in ddp.grad_buffers[0].buckets]
    sizes = [bucket.span.size for bucket in ddp.grad_buffers[0].buckets]
    inside = sum(size for size, layer in zip(sizes, layers, strict=True) if layer)
    return log.nbytes("all_gather", axis="dp_cp") // 8, inside, sum(sizes) - inside


@SLOW
@pytest.mark.parametrize("layout", [{}, {"num_virtual_stages_per_pipeline_rank": 2}], ids=["1f1b", "interleaved"])
def test_stages_gather_their_own_layers_only(ranks: Any, layout: dict[str, Any]) -> None:
    case = Case(
        {"pipeline_model_parallel_size": 2, **layout},
        {"num_layers": 4},
        accumulation=2,
        sharding="optim_grads_params",
        double=True,
    )
    for gathered, inside, outside in ranks(4).run(gathered_in_a_pipeline, case):
        assert gathered == case.accumulation * 2 * (inside + outside)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def events_of(rank: int, world: int, recompute: bool) -> tuple[list[trace.Event], int]:
    """Of two microbatches in the block; hooks that are left after it."""
    mesh = Mesh.build(ParallelConfig())
    case = Case({}, {"num_layers": 3, **(FULL if recompute else {})}, accumulation=2)
    ddp = DistributedDataParallel(build_model(case.config, mesh, 0), mesh, sharding="optim_grads_params")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ddp.modules()]
    with trace.record(rank) as log, units_in_trace(ddp):
        accumulate(ddp, case, mesh)
    left = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ddp.modules()]
    return log.events, sum(left) - sum(hooks)


@pytest.mark.parametrize("recompute", [False, True])
def test_units_run_forward_and_backward_one_after_the_other(ranks: Any, recompute: bool) -> None:
    from course.figures.data_parallel import gathers_of

    for events, left in ranks(2).run(events_of, recompute):
        assert left == 0
        spans = sorted((e for e in events if e.kind == "unit"), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in pairwise(spans)), "one at a time"
        runs = [key for key, _ in groupby((e.name, e.note) for e in spans)]
        layers = [(name, note) for name, note in runs if note != "outside"]
        once = [("forward", f"unit {i}") for i in range(3)] + [("backward", f"unit {i}") for i in (2, 1, 0)]
        assert layers == 2 * once
        assert runs[0] == ("forward", "outside") and ("backward", "outside") in runs
        for gather in gathers_of(events):
            assert not any(e.start < gather.end < e.end for e in spans), "what is waited for is not computed"


class Net(nn.Module):
    is_stage = True

    def __init__(self, layers: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.decoder = nn.Module()
        self.decoder.layers = layers
        self.decoder.norm = nn.LayerNorm(3)


@pytest.mark.parametrize("named", [False, True])
def test_a_unit_is_a_layer_or_what_is_in_no_list(named: bool) -> None:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    net = Net(nn.ModuleDict({"7": layers[0], "8": layers[1]}) if named else nn.ModuleList(layers))
    outside, first, second = units_of(net)
    assert outside.module is net and first.module is layers[0] and second.module is layers[1]
    assert [p.shape for p in outside.params] == [(4, 3), (3,), (3,)]
    assert [m for m, _ in leaves_of(outside)] == [net.embedding, net.decoder.norm]
    assert [m for m, _ in leaves_of(first)] == [first.module]


def generated(rank: int, world: int, case: Case) -> list[list[int]]:
    """Each replica continues a prompt of its own, of its own length, right after a step; and then trains on."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(ADAM, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    accumulate(ddp, case, mesh)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"with ddp\.whole_weights\(\):"):
        generate(ddp.eval().module, [[1, 2, 3]], 4)
    with ddp.whole_weights():
        tokens = generate(ddp.module, [[1 + rank] * (3 + rank)], 4 + rank)[0].tokens
    accumulate(ddp.train(), case, mesh)
    return tokens


@pytest.mark.parametrize("sharding", mostly_thorough(["optim_grads_params", "fsdp2"], [0]))
def test_a_model_in_shards_generates_from_whole_weights(ranks: Any, sharding: str) -> None:
    case = Case({}, {"num_layers": 3}, sharding=sharding)
    model = serial_model(case)
    serial_backward(model, case, 2)
    build_optimizer(ADAM, model, Mesh.serial()).step()
    for rank, tokens in enumerate(ranks(2).run(generated, case)):
        assert tokens == generate(model.eval(), [[1 + rank] * (3 + rank)], 4 + rank)[0].tokens
