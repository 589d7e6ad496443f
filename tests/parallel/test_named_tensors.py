"""Two tensors travel between stages, and a third one of integers: under every schedule the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.errors import RankError
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.param import Init
from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline import plain as pipeline
from minimegatron.parallel.pipeline.execution import Specs, Tensors, TensorSpec
from minimegatron.parallel.pipeline.schedules import SCHEDULES, build_schedule
from minimegatron.parallel.pipeline.stage import ModuleStage
from tests.thorough import mostly_thorough

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
