"""Recompute and dropout: the second forward pass is the first one again, on every rank."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.random import RngStreams
from minimegatron.config import ParallelConfig
from minimegatron.layers import recompute as recompute_module
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

WAYS = {
    "selective core": {"recompute_granularity": "selective"},
    "selective all": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    "full uniform 1": {"recompute_granularity": "full"},
    "full uniform 2": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "full block 2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}


def streams(mesh: Mesh) -> RngStreams:
    return RngStreams.on_mesh(5, mesh)


def gradients_of_ways(rank: int, world: int, sp: bool) -> dict[str, list[torch.Tensor]]:
    return {name: gradients(rank, world, way, sp) for name, way in {"none": {}, **WAYS}.items()}


def gradients(rank: int, world: int, way: dict, sp: bool) -> list[torch.Tensor]:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sp))
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    config = family_config("llama", **sizes, hidden_dropout=0.3, attention_dropout=0.3, **way)
    rng = streams(mesh)
    model = build_model(config, mesh, seed=1, rng=rng)
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(2))
    loss = model(tokens, labels=tokens.roll(-1, 1)).sum()
    loss.backward()
    after = torch.rand(3)  # the default stream must be where it would be without recompute
    return [loss.detach(), after, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("tp,sp", [(1, False), (2, True), (2, False)])
def test_bit_equal_to_no_recompute(ranks, tp, sp):
    for found in ranks(tp).run(gradients_of_ways, sp):
        for way, again in found.items():
            assert all(torch.equal(a, b) for a, b in zip(found["none"], again, strict=True)), way


def forgetful(rank: int, world: int) -> list[torch.Tensor]:
    """Recompute that restores the default generator but not the named streams: the classic mistake."""
    real = recompute_module.recompute
    from minimegatron.models import block

    block.recompute = lambda function, *args, rng=None: real(function, *args, rng=None)
    try:
        return gradients(rank, world, WAYS["full uniform 1"], True)
    finally:
        block.recompute = real


def test_forgetting_the_named_streams_would_be_seen(ranks):
    pool = ranks(2)
    plain, wrong = pool.run(gradients, {}, True)[0], pool.run(forgetful)[0]
    assert torch.equal(plain[0], wrong[0]), "the loss does not show it"
    assert not all(torch.equal(a, b) for a, b in zip(plain[2:], wrong[2:], strict=True))


def test_a_recomputed_module_keeps_its_names_and_nothing_else():
    """In training the inside is computed twice; the hidden state between its two layers is not kept."""
    runs = []

    class Counted(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(torch.is_grad_enabled())
            return super().forward(x)

    torch.manual_seed(1)
    module = Counted(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    x = torch.randn(2, 4)
    module(x).sum().backward()
    want = [p.grad.clone() for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]
    runs.clear()
    module.zero_grad()
    recompute_module.recompute_module(module)
    module(x).sum().backward()
    assert len(runs) == 2 and [name for name, _ in module.named_parameters()] == names
    assert all(torch.equal(p.grad, w) for p, w in zip(module.parameters(), want, strict=True))
    runs.clear()
    module.eval()(x).sum().backward()
    assert len(runs) == 1


def masks(rank: int, world: int, sp: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Which elements the residual dropout and the attention dropout drop on this rank."""
    from minimegatron.layers.dropout import Dropout

    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=world, sequence_parallel=sp))
    rng, ones = streams(mesh), torch.ones(64)
    return Dropout(0.5, rng, different_over_tp=sp)(ones), Dropout(0.5, rng, different_over_tp=True)(ones)


@pytest.mark.parametrize("sp", [False, True])
def test_who_drops_the_same_elements(ranks, sp):
    (residual0, heads0), (residual1, heads1) = ranks(2).run(masks, sp)
    assert torch.equal(residual0, residual1) is (not sp)
    assert not torch.equal(heads0, heads1)
