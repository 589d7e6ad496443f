"""Experts at the ends of what a router can do: nobody, everybody, nothing dropped or all of it, one token, none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of
from tests import twin
from tests.layers.test_moe import H, new_layer
from tests.parallel.test_expert_twin import EP, ETP, EXPERTS, PP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case

# ------------------------------------------------------------------------ a model whose biases force the choice

SIGMOID: dict[str, Any] = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
PENALTIES: dict[str, Any] = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
NOBODY_TO_THE_FIRST, ALL_TO_THE_LAST = [-9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]
Forced = tuple[list[float] | None, Case]


def extreme(layout: dict[str, Any], bias: list[float] | None, more: dict[str, Any], **case: Any) -> Forced:
    alltoall = {"moe_token_dispatcher_type": "alltoall"}
    return bias, Case(layout, {**(SIGMOID if bias else EXPERTS), **alltoall, **more}, double=True, **case)


def drop(factor: float, pad: bool = False) -> dict[str, Any]:
    return {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": pad}


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
ONE = {"moe_router_topk": 1}
TWO_RANKS: list[Forced] = [
    extreme({EP: 2}, NOBODY_TO_THE_FIRST, PENALTIES),
    extreme({EP: 2}, ALL_TO_THE_LAST, {**ONE, **PENALTIES}, accumulation=2),
    extreme({EP: 2}, ALL_TO_THE_LAST, {**ONE, **ALLGATHER}),
    extreme({EP: 2}, ALL_TO_THE_LAST, {**ONE, **drop(1.0)}),
    extreme({EP: 2}, None, {**drop(0.0), **PENALTIES}),
    extreme({EP: 2}, None, drop(0.0, pad=True)),
    extreme({EP: 2}, None, drop(float("inf"))),
    extreme({EP: 2}, None, drop(0.6, pad=True)),
    extreme({EP: 2}, None, {"moe_router_topk": 4, **PENALTIES}),
    extreme({EP: 2}, None, PENALTIES, seq_length=1, micro_batch_size=1, seed=2),
    extreme({TP: 2, SP: True, ETP: 2}, ALL_TO_THE_LAST, ONE),
    extreme({PP: 2}, ALL_TO_THE_LAST, ONE, accumulation=2),
]
FOUR_RANKS: list[Forced] = [
    extreme({EP: 4}, ALL_TO_THE_LAST, {**ONE, "moe_shared_expert_intermediate_size": 40}),
    extreme({EP: 4}, ALL_TO_THE_LAST, {**ONE, **ALLGATHER}),
    extreme({EP: 4}, None, {**drop(0.0), "recompute_granularity": "full"}),
    extreme({TP: 2, SP: True, EP: 2, ETP: 2}, NOBODY_TO_THE_FIRST, {}),
    extreme({TP: 2, SP: True, EP: 2, ETP: 1}, None, drop(0.0)),
    extreme({TP: 2, SP: True, EP: 4, ETP: 1}, ALL_TO_THE_LAST, ONE),
]


def compare(rank: int, world: int, forced: list[Forced]) -> list[dict[str, Any]]:
    real, found = twin.weights, []
    for bias, case in forced:

        def weights(*model: Any, bias: list[float] | None = bias) -> dict[str, torch.Tensor]:
            tensors = real(*model)
            return {n: torch.tensor(bias) if "expert_bias" in n else t for n, t in tensors.items()}

        with mock.patch.object(twin, "weights", weights):
            found += twin.compare_all(rank, world, [case])
    return found


FORCED = mostly_thorough([(2, TWO_RANKS), (4, FOUR_RANKS)], [0])


@pytest.mark.parametrize("world, forced", FORCED, ids=["2 ranks", "4 ranks"])
def test_gradients_are_those_of_one_process(ranks, world, forced):
    for reports in ranks(world).run(compare, forced, timeout=120):
        for (_, case), report in zip(forced, reports, strict=True):
            assert twin.problems(report, 1e-10) == [], case


# ------------------------------------------------------------- a layer whose ranks have other numbers of tokens

COUNTS = {2: ([1, 0], [0, 7], [0, 0]), 4: ([0, 0, 1, 0], [5, 0, 0, 3], [0, 0, 0, 0])}


def uneven(rank: int, world: int, layout: dict[str, Any], fields: dict[str, Any]) -> list[float]:
    """The largest difference from one process with all tokens, for each row of COUNTS: output and every gradient."""
    mesh = Mesh.build(ParallelConfig(**layout, variable_seq_lengths=True))
    found = []
    for counts in COUNTS[world]:
        first, n = sum(counts[:rank]), counts[rank]
        x = torch.randn(sum(counts), 1, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        whole, part = x.clone().requires_grad_(), x[first : first + n].clone().requires_grad_()
        serial, layer = new_layer(**fields).double(), new_layer(mesh, **fields).double()
        for model, tokens in ((serial, whole), (layer, part)):
            (model(tokens).sin() * torch.arange(1, H + 1)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters() if p.requires_grad), "zeros, and not nothing"
        assert layer.router.tally.isfinite().all()
        pairs = [(part.grad, whole.grad[first : first + n])]
        with torch.no_grad():
            pairs.append((layer(part), serial(whole)[first : first + n]))
        for one, other in zip(layer.parameters(), serial.parameters(), strict=True):
            if one.requires_grad:
                grad = c.all_reduce(one.grad, mesh.world if layout_of(one).experts is None else mesh.edp)
                pairs.append((gather_logical(grad, layout_of(one), mesh), other.grad))
        found.append(max((a - b).abs().max().item() for a, b in pairs if a.numel()))
    return found


@pytest.mark.parametrize("world, layout", [(2, {EP: 2}), (4, {EP: 4}), (4, {EP: 2, ETP: 2})], ids=str)
def test_one_token_in_all_and_ranks_without_any(ranks, world, layout):
    fields = {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 20}
    for found in ranks(world).run(uneven, layout, {**fields}):
        assert max(found) < 1e-12
    penalised = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"}
    for found in ranks(world).run(uneven, layout, {**fields, **penalised}):
        assert max(found) < 1e-12, "the batch's shares are those of the tokens, however they lie"
