"""Whose magnitude counts: a tensor that several ranks hold parts of has one scale, and two tensors have two."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.layers.attention.mla import ReplicatedLinear
from minimegatron.layers.fp8 import linear as fp8_model
from minimegatron.layers.fp8.matmul import E4M3, Fp8Recipe
from minimegatron.layers.fp8.scaling import DelayedScale, together
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.moe.layer import Experts
from minimegatron.layers.param import Init
from tests.layers.test_fp8 import normal

TOKENS, WIDTH, INNER = 32, 32, 64


def peaked(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Its largest number is in the last row and column: with the last rank of any cut."""
    x = normal(rows, columns, seed=seed)
    x[-1, -1] = 7.0 * x.abs().max()
    return x


def part(size: int, rank: int, world: int) -> slice:
    return slice(rank * size // world, (rank + 1) * size // world)


def of_latents(rank: int, world: int) -> list[torch.Tensor]:
    """y, dx, dW, whole, of a matrix that every rank has, with the tokens that it holds."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=world > 1))
    layer = ReplicatedLinear(WIDTH, INNER, Init(), torch.float32)
    fp8_model.enable_fp8(layer, settings("tensorwise"), mesh)
    mine = part(TOKENS, rank, world)
    x = peaked(TOKENS, WIDTH, 0)[mine].clone().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(peaked(INNER, WIDTH, 1))
    y = layer(x)
    y.backward(peaked(TOKENS, INNER, 2)[mine])
    return [all_gather(y.detach(), mesh.tp), all_gather(x.grad, mesh.tp), all_reduce(layer.weight.grad, mesh.tp)]


def of_an_expert(rank: int, world: int) -> list[torch.Tensor]:
    """Products of fc1 (its outputs cut) and fc2 (its inputs cut): y, dx, dW, whole."""
    parallel = ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=world > 1)
    config = settings("tensorwise", num_experts=2, moe_ffn_hidden_size=INNER, add_bias_linear=False)
    mesh = Mesh.build(parallel)
    assert mesh.etp.size == world
    experts = Experts(config, mesh)
    fp8_model.enable_fp8(experts, config, mesh)
    fc1, fc2 = experts._products(0, TOKENS)
    mine, found = part(INNER, rank, world), []
    x, w1, dy = peaked(TOKENS, WIDTH, 0), peaked(INNER, WIDTH, 1)[mine], peaked(TOKENS, INNER, 2)[:, mine]
    x, w1 = x.clone().requires_grad_(), w1.clone().requires_grad_()
    y = fc1(x, w1)
    y.backward(dy)
    found += [all_gather(y.detach(), mesh.etp, 1), all_reduce(x.grad, mesh.etp), all_gather(w1.grad, mesh.etp)]
    x, w2, dy = peaked(TOKENS, INNER, 3)[:, mine], peaked(WIDTH, INNER, 4)[:, mine], peaked(TOKENS, WIDTH, 5)
    x, w2 = x.clone().requires_grad_(), w2.clone().requires_grad_()
    y = fc2(x, w2)
    y.backward(dy)
    found += [all_reduce(y.detach(), mesh.etp), all_gather(x.grad, mesh.etp, 1), all_gather(w2.grad, mesh.etp, 1)]
    return found


def settings(recipe: str, **more) -> TransformerConfig:
    return TransformerConfig(**{"hidden_size": WIDTH, "fp8_format": "hybrid", "fp8_recipe": recipe, **more})


@pytest.mark.parametrize("products", [of_latents, of_an_expert])
def test_parts_of_a_tensor_have_the_scale_of_the_whole(ranks, products):
    """With a scale of its own a rank would round its part otherwise: products would be off by percents."""
    want = products(0, 1)
    for got in ranks(2).run(products):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=3e-6 * b.abs().max().item())


def scales_after_a_step(rank: int, world: int, only: bool, layout: dict[str, int]) -> dict[str, float]:
    mesh = Mesh.build(ParallelConfig(**layout))
    layer = ColumnParallelLinear(WIDTH, INNER, mesh.tp, init=Init(), bias=False)
    fp8_model.enable_fp8(layer, settings("delayed", tp_only_amax_red=only), mesh)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.full((16, WIDTH), 2.0 + rank)
    layer(x).backward(torch.full((16, INNER // mesh.tp.size), 0.5 + rank))
    fp8_model.move_scales(layer, mesh)
    return {n.split(".")[1]: 1 / b.item() for n, b in layer.named_buffers() if n.endswith("scale")}


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}])
def test_who_agrees_on_a_delayed_scale(ranks, layout, only):
    """`tp_only_amax_red`: replicas of dp keep scales of their own; the ranks that share a model's tensors never do."""
    first, second = ranks(2).run(scales_after_a_step, only, layout)
    assert first["weight"] == second["weight"] == pytest.approx(1 / 448)
    assert second["input"] == pytest.approx(3 / 448) and second["gradient"] == pytest.approx(1.5 / 57344)
    if only and not layout:
        assert first["input"] == pytest.approx(2 / 448) and first["gradient"] == pytest.approx(0.5 / 57344)
    else:
        assert first == second


def ranks_with_other_numbers(rank: int, world: int) -> list[float]:
    """NaN on one rank, numbers on the other: a maximum must not lose it. Only the second tensor's scale moves."""
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world))
    states = [DelayedScale(Fp8Recipe(history=2), E4M3) for _ in range(2)]
    states[0](torch.tensor([[torch.nan if rank == 1 else 3.0]]))
    states[1](torch.tensor([[4.0 + rank]]))
    together(states).move(mesh.tp)
    return [s.scale.item() for s in states] + [h for s in states for h in s.amax_history.tolist()]


def test_an_overflow_on_one_rank_is_everybodys(ranks):
    for got in ranks(2).run(ranks_with_other_numbers):
        assert got == [1.0, pytest.approx(448 / 5), 0.0, 0.0, 0.0, 5.0]
