"""A mixture of experts against a loop over tokens and experts, and what must not change its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import ConfigError
from minimegatron.layers.logical import gather_logical, initialize
from minimegatron.layers.moe.balance import count_loads, move_biases
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.parallel.data.ddp import DistributedDataParallel
from tests.axes import EP, ETP, SP, TP

H, FFN, E = 16, 24, 8


def config(**fields: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": H, "num_experts": E, "moe_ffn_hidden_size": FFN, "add_bias_linear": False,
        "activation": "swiglu", "init_method_std": 0.3, "moe_router_topk": 3,
    }  # fmt: skip
    return TransformerConfig(**{**sizes, **fields})


def new_layer(mesh: Mesh | None = None, **fields: Any) -> MoELayer:
    layer = MoELayer(config(**fields), mesh or Mesh.serial())
    initialize(layer, 2)
    return layer


def tokens(s: int = 6, b: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(s, b, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Every token through every one of its experts, one at a time; weights after the second matrix."""
    probs, wanted = layer.router(x)
    out = 0 * x.flatten(0, 1)
    for t, token in enumerate(x.flatten(0, 1)):
        for e in wanted[t].nonzero().flatten().tolist():
            y = layer.experts.weight1[e] @ token
            gate, up = y.chunk(2) if layer.experts.gated else (y, None)
            inner = F.silu(gate) * up if up is not None else F.gelu(gate)
            out[t] = out[t] + probs[t, e] * (layer.experts.weight2[e] @ inner)
    y = out.view_as(x)
    return y if layer.shared_experts is None else y + layer.shared_experts(x)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "gelu", "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"moe_router_topk": E, "moe_shared_expert_intermediate_size": 20},
        {"moe_expert_capacity_factor": 0.7, "moe_router_score_function": "sigmoid"},
        {"moe_expert_capacity_factor": 0.0},
        {"num_experts": 1, "moe_router_topk": 1},
    ],
    ids=str,
)
def test_equals_the_definition(fields, dispatcher):
    layer = new_layer(moe_token_dispatcher_type=dispatcher, **fields).double()
    results = []
    for program in (layer, lambda x: by_definition(layer, x)):
        x = tokens().requires_grad_()
        layer.zero_grad()
        y = program(x)
        (y.sin() * torch.arange(H)).sum().backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in layer.parameters()]
        results.append([y.detach(), x.grad, *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_dropped_tokens_pass_by_the_layer():
    layer = new_layer(moe_expert_capacity_factor=0.5).double()
    x = tokens(10)
    nowhere = ~layer.router(x).map.any(1)
    y = layer(x).flatten(0, 1)
    assert 0 < nowhere.sum() < len(nowhere)
    assert not y[nowhere].any() and y[~nowhere].any(1).all()


@pytest.mark.parametrize("expanded", [False, True], ids=["gradient", "expanded gradient"])
@pytest.mark.parametrize("counts", [[12, 0, 0, 5, 0, 7, 0, 0], [0] * 8, [24, 0, 0, 0, 0, 0, 0, 0]], ids=str)
def test_the_grouped_product_equals_the_loop_for_every_load(counts, expanded):
    from minimegatron.layers.moe.dispatch import Dispatched

    layer, n = new_layer(), sum(counts)
    results = []
    for grouped in (False, True):
        layer.experts.grouped = grouped
        layer.zero_grad()
        x = tokens(n, 1).float().flatten(0, 1).requires_grad_()
        probs = torch.linspace(0.1, 1, n).requires_grad_()
        y = layer.experts(Dispatched(x, probs, counts, lambda y: y))
        (y if expanded else y * torch.arange(H)).sum().backward()
        results.append([y.detach(), x.grad, probs.grad, layer.experts.weight1.grad, layer.experts.weight2.grad])
    for got, want in zip(*results, strict=True):
        assert got is not None and want is not None, "an expert without tokens has a gradient of zeros"
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- ranks


def skewed(rank: int, world: int, to: int, dispatcher: str) -> list[tuple[int, float, float]]:
    """(first expert of this rank, largest weight gradient of each expert) when all tokens go to experts `to` on."""
    mesh = Mesh.build(ParallelConfig(expert_model_parallel_size=world))
    layer = new_layer(mesh, moe_router_topk=2, moe_token_dispatcher_type=dispatcher).double()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[to : to + 2] = 1.0
    x = (tokens(seed=rank).abs()).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert x.grad.abs().min() > 0 and all(p.grad is not None for p in layer.parameters())
    first = layout_of(layer.experts.weight1).experts[0]
    grads = zip(layer.experts.weight1.grad, layer.experts.weight2.grad, strict=True)
    return [(first + i, a.abs().max().item(), b.abs().max().item()) for i, (a, b) in enumerate(grads)]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_to_which_nobody_sends_have_gradients_of_zeros(ranks, world, dispatcher):
    for to in (0, 3, 6):
        found = [entry for per_rank in ranks(world).run(skewed, to, dispatcher) for entry in per_rank]
        assert [e for e, _, _ in found] == list(range(E))
        for e, one, two in found:
            assert (one > 0 and two > 0) == (e in (to, to + 1)), (e, one, two)


def logical(rank: int, world: int, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    mesh = Mesh.build(ParallelConfig(**layout))
    layer = new_layer(mesh, moe_shared_expert_intermediate_size=20)
    return {n: gather_logical(p, layout_of(p), mesh) for n, p in logical_parameters(layer)}


@pytest.mark.parametrize("layout", [{EP: 4}, {EP: 2, ETP: 2}, {TP: 2, SP: True, ETP: 1, EP: 2}, {ETP: 4}], ids=str)
def test_the_same_seed_is_the_same_layer_in_every_layout(ranks, layout):
    want = logical(0, 1, {})
    assert not torch.equal(want["experts.weight1"][0], want["experts.weight1"][1])
    for got in ranks(4).run(logical, layout):
        assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)


def shared(rank: int, world: int, overlap: bool) -> tuple[list[torch.Tensor], list[tuple[str, float, float]]]:
    mesh = Mesh.build(ParallelConfig(**{TP: 2, SP: True, EP: 2, ETP: 1}))
    layer = new_layer(
        mesh,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_overlap=overlap,
        moe_token_dispatcher_type="alltoall",
    )
    x = tokens(4, 2, rank).float().requires_grad_()
    with trace.record(rank) as log:
        y = layer(x)
        y.square().sum().backward()
    events = [(f"{e.name}/{e.axis}", e.start, e.end) for e in log.select(kind="comm")]
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())], events


def test_shared_experts_are_computed_while_tokens_travel(ranks):
    plain, overlapped = (ranks(2).run(shared, overlap) for overlap in (False, True))
    for (want, apart), (got, events) in zip(plain, overlapped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for found, meanwhile in ((apart, False), (events, True)):
            gather = next(e for e in found if e[0] == "all_gather/tp")  # the shared expert's first
            around = [e for e in found if e[0] == "all_to_all/ep" and e[1] < gather[1] and gather[2] < e[2]]
            assert bool(around) is meanwhile


def backward_overlaps(rank: int, world: int) -> bool:
    _, events = shared(rank, world, True)
    last = [e for e in events if e[0] == "all_gather/tp"][-1]  # of the shared expert's backward pass
    return any(e[0] == "all_to_all/ep" and e[1] < last[1] and last[2] < e[2] for e in events)


def test_in_the_backward_pass_as_well(ranks):
    assert all(ranks(2).run(backward_overlaps))


def loads(rank: int, world: int, layout: dict[str, Any]) -> tuple[list[int], int, float, list[float]]:
    mesh = Mesh.build(ParallelConfig(**layout))
    layer = new_layer(
        mesh, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.1
    )
    for i in range(2):
        layer(tokens(seed=10 * rank + i).float()).sum().backward()
    found = count_loads(layer, mesh)
    assert found is not None and not layer.router.tally.any()
    move_biases(layer, found)
    (only,) = found.to_host()
    return only.tokens, only.dropped, only.balancing_loss, layer.router.expert_bias.tolist()


@pytest.mark.parametrize(
    "layout",
    [{"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}],
    ids=["ep", "tp"],
)
def test_loads_and_biases_are_those_of_all_ranks(ranks, layout):
    first, *others = ranks(4).run(loads, layout)
    assert all(other == first for other in others)
    counts, dropped, balancing, bias = first
    assert sum(counts) == 4 * 2 * 12 * 3 and dropped == 0 and 0.1 < balancing < 0.2
    mean = sum(counts) / E
    assert bias == pytest.approx([1e-3 * ((n < mean) - (n > mean)) for n in counts])


def test_experts_have_a_buffer_of_their_own():
    ddp = DistributedDataParallel(new_layer(), Mesh.serial())
    dense, experts = ddp.grad_buffers
    assert (dense.axis.name, experts.axis.name) == ("dp_cp", "edp")
    assert set(experts.params) == {"experts.weight1", "experts.weight2"} and set(dense.params) == {"router.weight"}


@pytest.mark.parametrize(
    "layout, fields, words",
    [
        ({TP: 2}, {}, "no sequence_parallel"),
        ({EP: 3}, {}, "does not divide num_experts (8)"),
        ({ETP: 5}, {}, "does not divide moe_ffn_hidden_size (24)"),
        ({EP: 2}, {"num_experts": None, "moe_router_topk": 2}, "has no experts"),
        ({"pipeline_model_parallel_size": 1, "variable_seq_lengths": True, EP: 2}, {}, "alltoall"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(layout, fields, words):
    with pytest.raises(ConfigError) as error:
        check_model_fits(config(**fields), ParallelConfig(**layout))
    assert words in str(error.value)
