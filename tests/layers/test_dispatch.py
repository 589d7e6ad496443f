"""Tokens arrive where they are sent, come back where they left, and move exactly the bytes that the formula says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from minimegatron import trace
from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.layers.moe.dispatch import DISPATCHERS, Dispatched, Permutation, dispatch_bytes
from minimegatron.layers.moe.router import Routing

E, H = 8, 6
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {EP: 2}),
    (2, {ETP: 2}),
    (4, {EP: 4}),
    (4, {EP: 2}),
    (4, {EP: 2, ETP: 2}),
]
LOADS = ("random", "all to one", "none to the last", "one token", "every expert", "nothing")


def routing(load: str, rank: int) -> Routing:
    """A routing of some tokens whose weights sum to 1 for each."""
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = 1 if load == "one token" else 9
    wanted = torch.zeros(tokens, E, dtype=torch.bool)
    likes = torch.rand(tokens, E, generator=generator)
    if load == "all to one":
        wanted[:, 5] = True
    elif load == "every expert":
        wanted[:] = True
    elif load != "nothing":
        likes[:, E // 2 :] -= 2.0 if load == "none to the last" else 0.0
        wanted.scatter_(1, likes.topk(2, -1).indices, True)
    probs = torch.rand(tokens, E, generator=generator, dtype=torch.float64) * wanted
    return Routing((probs / probs.sum(1, keepdim=True).clamp(min=1e-9)).requires_grad_(), wanted)


def config(dispatcher: str, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=H,
        num_attention_heads=1,
        num_experts=E,
        add_bias_linear=False,
        moe_token_dispatcher_type=dispatcher,
        **fields,
    )


def expert_of(mesh: Mesh, sent: Dispatched) -> torch.Tensor:
    """The global number of the expert of each row."""
    local = E // mesh.ep.size
    return torch.repeat_interleave(torch.arange(local) + local * mesh.ep.rank, torch.tensor(sent.counts))


def travel(rank: int, world: int, layout: dict[str, Any], dispatcher: str, load: str) -> dict[str, Any]:
    """Experts that multiply by their number + 1, each etp rank giving an equal part of the result."""
    mesh = Mesh.build(ParallelConfig(**layout))
    route = routing(load, rank)
    x = torch.randn(len(route.map), H, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_()
    with trace.record(rank) as log:
        sent = DISPATCHERS[dispatcher](config(dispatcher), mesh).dispatch(x, route)()
    number = expert_of(mesh, sent) + 1.0
    y = sent.back(sent.rows * (sent.probs * number)[:, None] / mesh.etp.size)
    (y * torch.arange(1, H + 1)).sum().backward()
    weights = (route.probs.detach() * torch.arange(1.0, E + 1)).sum(1, keepdim=True)
    want_x = weights * torch.arange(1, H + 1)
    want_p = (x.detach() @ torch.arange(1.0, H + 1).double())[:, None] * torch.arange(1.0, E + 1) * route.map
    arrived = c.all_reduce(torch.tensor(float(sum(sent.counts))), mesh.world).item() / mesh.etp.size
    sorted_rows = all(a <= b for a, b in itertools.pairwise(number.tolist()))
    return {
        "y": (y - x * weights).abs().max().item(),
        "dx": (x.grad - want_x).abs().max().item(),
        "dp": (route.probs.grad - want_p).abs().max().item(),
        "lost": c.all_reduce(route.map.sum().double(), mesh.world).item() - arrived,
        "sorted": sorted_rows and len(sent.rows) == sum(sent.counts),
        "collectives": log.count(),
        "bits": (y.detach(), x.grad, route.probs.grad, sent.rows.detach(), sent.counts),
    }


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("world, layout", LAYOUTS, ids=str)
def test_there_and_back(ranks, world, layout, load):
    ways = [ranks(world).run(travel, layout, dispatcher, load) for dispatcher in DISPATCHERS]
    for found in itertools.chain(*ways):
        assert max(found["y"], found["dx"], found["dp"]) < 1e-12
        assert found["lost"] == 0 and found["sorted"]
        assert (found["collectives"] == 0) == (world == 1)
    for one, other in zip(*ways, strict=True):
        rows = [found["bits"][3] for found in (one, other)]
        assert torch.equal(*rows), "experts see the same rows in the same order"
        assert one["bits"][4] == other["bits"][4]
        if ETP not in layout and load != "every expert":  # a token's sum has one addition: the order is the same
            assert all(torch.equal(a, b) for a, b in zip(one["bits"][:3], other["bits"][:3], strict=True))


def test_permutation_and_its_inverse():
    route = Routing(torch.rand(5, 3), torch.tensor([[1, 0, 1], [0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]).bool())
    x = torch.arange(5.0)[:, None].expand(5, 2)
    order = Permutation(x, route, config("alltoall"))
    source = [0, 3, 4, 0, 2, 4]  # by expert, then by token; expert 1 gets nothing
    rows, probs = order.rows(len(source))
    assert torch.equal(rows, x[source])
    assert torch.equal(probs, route.probs[source, torch.tensor([0, 0, 0, 2, 2, 2])])
    assert torch.equal(order.back(rows), x * route.map.sum(1, keepdim=True))


def measured(rank: int, world: int, layout: dict[str, Any], dispatcher: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by collective of a forward pass with an even load: counted, and by the formula."""
    mesh, tokens = Mesh.build(ParallelConfig(**layout)), 16
    wanted = torch.zeros(tokens, E, dtype=torch.bool)
    for i in range(tokens):
        wanted[i, [i % E, (i + 3) % E]] = True
    x, model = torch.randn(tokens, H), config(dispatcher)
    with trace.record(rank) as log:
        sent = DISPATCHERS[dispatcher](model, mesh).dispatch(x, Routing(wanted / 2, wanted))()
        sent.back(sent.rows)
    counted = {name: row["nbytes"] for name, row in log.summary().items()}
    return counted, dispatch_bytes(model, tokens, mesh.ep.size, mesh.etp.size)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("world, layout", [(2, {EP: 2}), (2, {ETP: 2}), (4, {EP: 4}), (4, {EP: 2, ETP: 2})], ids=str)
def test_bytes_are_those_of_the_formula(ranks, world, layout, dispatcher):
    for counted, formula in ranks(world, fingerprints=False).run(measured, layout, dispatcher):
        assert counted == formula and counted
