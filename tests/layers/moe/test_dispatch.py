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
from minimegatron.layers.logical import initialize
from minimegatron.layers.moe.dispatch import DISPATCHERS, Dispatched, dispatch_bytes
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.moe.permutation import Permutation
from minimegatron.layers.moe.router import LOOK, TINY, TOLERANCE, Routing, sinkhorn
from minimegatron.layers.recompute import recompute, to_host
from minimegatron.models.decoder import build_model
from tests.axes import EP, ETP
from tests.thorough import mostly_slow
from tests.waits import waits

E, H = 8, 6
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (2, {EP: 2}), (2, {ETP: 2}), (4, {EP: 4}), (4, {EP: 2}), (4, {EP: 2, ETP: 2}),
]  # fmt: skip
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


def travels(rank: int, world: int, layout: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each load what each dispatcher does with it."""
    mesh = Mesh.build(ParallelConfig(**layout))
    return {load: [travel(rank, mesh, dispatcher, load) for dispatcher in DISPATCHERS] for load in LOADS}


def travel(rank: int, mesh: Mesh, dispatcher: str, load: str) -> dict[str, Any]:
    """Experts that multiply by their number + 1, each etp rank giving an equal part of the result."""
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


@pytest.mark.parametrize("world, layout", mostly_slow(LAYOUTS, [0, 1, 2, 5]), ids=str)
def test_there_and_back(ranks, world, layout):
    for load, (one, other) in itertools.chain(*(found.items() for found in ranks(world).run(travels, layout))):
        for found in (one, other):
            assert max(found["y"], found["dx"], found["dp"]) < 1e-12, load
            assert found["lost"] == 0 and found["sorted"], load
            assert (found["collectives"] == 0) == (world == 1), load
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
    for counted, formula in ranks(world).run(measured, layout, dispatcher):
        assert counted == formula and counted


# ---------------------------------------------------------------------------------------------- what the host waits for

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"moe_grouped_gemm": True, "params_dtype": "bf16"},
    "losses": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "capacity": {"moe_expert_capacity_factor": 0.7},
    "padded": {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    "bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "shared": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True},
}


def small(dispatcher: str = "alltoall", **fields: Any) -> TransformerConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 32, "num_experts": 4, "moe_ffn_hidden_size": 16}
    return TransformerConfig(**sizes, add_bias_linear=False, moe_token_dispatcher_type=dispatcher, **fields)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_waits_for_its_counts(kind, dispatcher):
    made = small("alltoall" if kind == "shared" else dispatcher, **KINDS[kind])
    layer = MoELayer(made, Mesh.serial())
    initialize(layer, 1)
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(0)).to(made.dtype).requires_grad_()
    with waits() as forward:
        y = layer(x)
    dy = torch.ones_like(y)
    with waits() as backward:
        y.backward(dy)
    assert forward == ["tolist"] and backward == []
    assert x.grad is not None and x.grad.any() and layer.router.weight.grad is not None


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("kind", ["plain", "capacity", "padded"])
def test_kernels_move_the_same_rows(kind, dispatcher):
    found = []
    for wish in ("torch", "emulated"):
        layer = MoELayer(small(dispatcher, activation="swiglu", kernels=wish, **KINDS[kind]), Mesh.serial())
        initialize(layer, 1)
        x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with waits() as forward:
            y = layer(x)
        with waits() as backward:
            y.square().sum().backward()
        assert forward.count("tolist") == 1 and not [w for w in forward + backward if "mask" in w or "nonzero" in w]
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_is_computed_again_is_not_read_again():
    made = small(num_layers=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    grads = []
    for each in (made, small(num_layers=2)):
        model = build_model(each, Mesh.serial(), 1)
        loss = model(ids, labels=ids).sum()
        with waits() as found:
            loss.backward()
        assert found == []
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_second_run_gets_the_numbers_of_the_first_in_order_every_time():
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append([to_host(torch.tensor([len(seen)])), to_host(torch.tensor([10 + len(seen)]))])
        return (x * x).sin() * x

    x = torch.ones(3, requires_grad=True)
    y = recompute(function, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [[[0], [10]]] * 3 and to_host(torch.tensor([5])) == [5]


@pytest.mark.parametrize("sharp", [0.01, 1.0, 6.0])
def test_sinkhorn_stops_where_a_look_after_every_sweep_would(sharp):
    logits = sharp * torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    c = (logits.double() - logits.double().amax(1, keepdim=True)).exp()
    columns, sweeps = c.new_ones(8), 0
    while True:
        sweeps += 1
        rows = 1 / (64 * ((c @ columns) + TINY))
        before, columns = columns, 1 / (8 * ((rows @ c) + TINY))
        if not (columns - before).abs().mean() > TOLERANCE:
            break
    with waits() as found:
        got = sinkhorn(logits, Mesh.serial().world)
    assert torch.equal(got, rows[:, None] * c * columns)
    assert len(found) <= max(1, (sweeps - 1).bit_length() - LOOK.bit_length() + 2) < max(sweeps, 2)
