"""Routing against its definition and against Megatron's functions; penalties against autograd on the definition."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.logical import initialize
from minimegatron.layers.moe import router as r
from minimegatron.layers.moe import router as s
from minimegatron.layers.moe.balance import count_loads, move_biases
from minimegatron.layers.recompute import recompute
from tests import twin
from tests.axes import CP, EP, ETP, SP, TP
from tests.parallel.test_expert_twin import EXPERTS
from tests.thorough import mostly_slow
from tests.twin import Case

T, E, H = 12, 8, 16


def config(**fields: Any) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": H, "num_experts": E, "add_bias_linear": False, "init_method_std": 0.5}
    return TransformerConfig(**{**sizes, **fields})


def new_router(mesh: Mesh | None = None, **fields: Any) -> r.TopKRouter:
    router = r.TopKRouter(config(**fields), mesh or Mesh.serial())
    initialize(router, 1)
    return router


def logits(seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(T, E, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ the choice

CHOICES: list[dict[str, Any]] = [
    {"moe_router_topk": k, **fields}
    for k, fields in itertools.product(
        (1, 2, 4, 8),
        (
            {"moe_router_pre_softmax": True},
            {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
        ),
    )
]
CHOICES += [{"moe_router_topk": k} for k in (2, 8)]
CHOICES += [
    {"moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2, **fields}
    for fields in ({}, {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"})
]


@pytest.mark.parametrize("fields", CHOICES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_the_choice_is_megatrons(fields):
    pytest.importorskip("megatron.core", reason="the oracle is optional")
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    model, x = config(**fields), logits()
    sigmoid = model.moe_router_score_function == "sigmoid"
    bias = torch.linspace(-0.5, 0.5, E) if sigmoid else None
    want, wanted = topk_routing_with_score_function(
        x,
        model.moe_router_topk,
        use_pre_softmax=model.moe_router_pre_softmax,
        num_groups=model.moe_router_num_groups,
        group_topk=model.moe_router_group_topk,
        scaling_factor=model.moe_router_topk_scaling_factor,
        score_function=model.moe_router_score_function,
        expert_bias=bias,
    )
    weights, chosen = r.choose(x, model, bias)
    assert torch.equal(torch.zeros_like(x).scatter(1, chosen, weights), want)
    assert torch.equal(torch.zeros_like(x, dtype=torch.bool).scatter(1, chosen, True), wanted)


def test_groups_by_hand():
    model = config(moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=1, moe_router_pre_softmax=True)
    scores = torch.tensor([[9.0, 0.0, 5.5, 5.0, 1.0, 1.0, 0.0, 0.0]])
    # the best expert alone is in group 0, the best pair in group 1
    assert sorted(r.best(scores, model)[0].tolist()) == [2, 3]
    two = config(moe_router_topk=2, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_pre_softmax=True)
    assert sorted(r.best(scores, two)[0].tolist()) == [0, 2]


def test_a_bias_moves_the_choice_and_never_the_weights():
    model = config(moe_router_score_function="sigmoid", moe_router_topk=2)
    x = logits()
    bias = torch.zeros(E)
    bias[5] = 10.0
    weights, chosen = r.choose(x, model, bias)
    assert (chosen == 5).any(1).all()
    scores = x.sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))


def test_logits_are_computed_in_fp32_whatever_the_model_is_in():
    router = new_router(params_dtype="bf16")
    assert router.weight.dtype == torch.bfloat16
    assert router(torch.randn(6, 2, H).bfloat16()).probs.dtype == torch.float32
    assert new_router(moe_router_dtype="fp64")(torch.randn(6, 2, H)).probs.dtype == torch.float64


def test_jitter_only_in_training_and_within_its_bounds():
    router, x = new_router(moe_input_jitter_eps=0.1), torch.ones(50, 2, H)
    factors = router._jitter(x)
    assert 0.9 <= factors.min() < 0.92 and 1.08 < factors.max() <= 1.1
    assert torch.equal(router.eval()._jitter(x), x)


# ----------------------------------------------------------------------------------------------- the capacity


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.25, 100.0])
@pytest.mark.filterwarnings("ignore")
def test_capacity_is_megatrons(factor, pad, policy):
    pytest.importorskip("megatron.core", reason="the oracle is optional")
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    model = config(
        moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=pad, moe_token_drop_policy=policy
    )
    weights, chosen = r.choose(logits(), model)
    probs = torch.zeros(T, E).scatter(1, chosen, weights)
    routing = r.Routing(probs, probs > 0)
    got = r.limit(routing, r.capacity(T, model), model)
    want, kept = apply_router_token_dropping(probs, routing.map, 2, factor, policy, pad)
    most = math.ceil(T * 2 / E * factor)
    assert got.map.sum(0).max() <= most
    assert (got.map.sum(0) == min(most, T)).all() or not pad
    if policy == "probs" and not pad:  # among equals, and among those with weight 0, we keep the first
        assert torch.equal(got.probs, want) and torch.equal(got.map, kept)
    assert torch.equal(got.probs.sum(0), want.sum(0)) or policy == "position"
    if policy == "position":
        first = (routing.map.cumsum(0) <= most) & routing.map
        assert torch.equal(got.probs, probs * first)


def test_a_capacity_without_bound_and_one_of_no_tokens():
    assert r.capacity(T, config(moe_expert_capacity_factor=math.inf)) == T
    assert r.capacity(0, config(moe_expert_capacity_factor=math.inf)) == 0
    assert r.capacity(T, config(moe_expert_capacity_factor=0.0)) == 0


# ---------------------------------------------------------------------------------------------- the penalties

AUX, Z = 0.7, 0.2
ALL, WEIGHTS = ("seq_aux_loss", "aux_loss", "global_aux_loss"), (0.7, 0.3, 0.1)


def penalised(kind: str | tuple[str, ...], score: str = "softmax", **fields: Any) -> dict[str, Any]:
    return {
        "moe_router_load_balancing_type": kind,
        "moe_router_score_function": score,
        "moe_aux_loss_coeff": AUX if isinstance(kind, str) else WEIGHTS[: len(kind)],
        "moe_z_loss_coeff": Z,
        **fields,
    }


def defined(router: r.TopKRouter, x: torch.Tensor, kind: str | tuple[str, ...]) -> torch.Tensor:
    """The penalties of a microbatch x [s, b, h], times its tokens, written as in the papers."""
    k, score = router.k, router.config.moe_router_score_function
    y = x @ router.weight.t()
    p = y.softmax(-1) if score == "softmax" else y.sigmoid() / y.sigmoid().sum(-1, keepdim=True)
    chosen = torch.zeros_like(p).scatter(-1, p.topk(k, -1).indices, 1.0)
    z = Z * y.logsumexp(-1).square().mean()
    total = z
    for one, weight in ((kind, AUX),) if isinstance(kind, str) else zip(kind, WEIGHTS, strict=True):
        sets = [(p.flatten(0, 1), chosen.flatten(0, 1))]
        if one == "seq_aux_loss":
            sets = list(zip(p.unbind(1), chosen.unbind(1), strict=True))
        losses = [weight * E / (k * len(q) ** 2) * (q.sum(0) * n.sum(0)).sum() for q, n in sets]
        total = total + torch.stack(losses).mean()
    return x.shape[0] * x.shape[1] * total


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss", ALL], ids=str)
def test_gradients_of_the_penalties_are_those_of_the_definition(kind, score):
    router = new_router(**penalised(kind, score)).double()
    router.loss_scale = 3.0
    x = torch.randn(6, 2, H, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(12, E, dtype=torch.float64)
    (router(x).probs * weights).sum().backward()
    got = x.grad, router.weight.grad
    x.grad = router.weight.grad = None
    bare = new_router(moe_router_score_function=score).double()
    ((bare(x).probs * weights).sum()).backward()
    direct = x.grad + torch.autograd.grad(3.0 * defined(bare, x, kind), x)[0]
    torch.testing.assert_close(got[0], direct, rtol=1e-12, atol=1e-12)
    rest = torch.autograd.grad(3.0 * defined(bare, x, kind), bare.weight)[0]
    torch.testing.assert_close(got[1], bare.weight.grad + rest, rtol=1e-12, atol=1e-12)
    assert rest.norm() > 1e-2, "the penalties matter in this test"
    reported = router.tally[E + 2 :].sum()
    torch.testing.assert_close(reported, defined(bare, x, kind).detach(), rtol=1e-12, atol=0)


def test_the_balancing_loss_is_its_coefficient_when_the_load_is_even():
    scores = torch.full((E, E), 1 / E)
    assert r.balancing_loss(scores, torch.full((1, E), 2 / E), 2).item() == pytest.approx(E)  # 1 for every token


def router_gradient(rank: int, world: int, layout: dict[str, Any], kind: str | tuple[str, ...]) -> torch.Tensor:
    """The summed gradient of the router's weight over all ranks: a batch of 4 samples, 2 microbatches in all."""
    mesh = Mesh.build(ParallelConfig(**layout))
    router = new_router(mesh, **penalised(kind)).double()
    for x in batch().chunk(2, 1)[mesh.dp.rank :: mesh.dp.size]:
        x = c.local_part(c.local_part(x, mesh.cp, 0), mesh.tp, 0)
        router(x).probs.sum().backward()
    return c.all_reduce(router.weight.grad.clone(), mesh.world)


def batch() -> torch.Tensor:
    return torch.randn(8, 4, H, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", mostly_slow([("aux_loss",), ("seq_aux_loss",), (ALL[:2],)], [-1]), ids=str)
def test_the_gradient_does_not_depend_on_the_layout(ranks, kind):
    tp, cp = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"context_parallel_size": 2}
    want = router_gradient(0, 1, {}, kind)
    for world, layout in ((2, tp), (2, cp), (2, {}), (4, {**tp, **cp}), (4, tp)):
        for got in ranks(world).run(router_gradient, layout, kind):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def global_gradient(rank: int, world: int) -> torch.Tensor:
    mesh = Mesh.build(ParallelConfig())
    router = new_router(mesh, **penalised("global_aux_loss")).double()
    for x in batch().chunk(2, 0):  # two microbatches, each cut over dp
        router(c.local_part(x, mesh.dp, 1)).probs.sum().backward()
    assert router.microbatches == 2
    return c.all_reduce(router.weight.grad.clone(), mesh.world)


def test_the_batch_so_far(ranks):
    """Shares are the mean over the microbatches until now, over all ranks."""
    weight = new_router().double().weight.detach().requires_grad_()
    counts, total = torch.zeros(E, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(batch().chunk(2, 0)):
        y = x.flatten(0, 1) @ weight.t()
        p = y.softmax(-1)
        counts = counts + torch.zeros_like(p).scatter(-1, p.topk(2, -1).indices, 1.0).sum(0)
        total = total + AUX * E / (2 * len(y)) * (p.sum(0) * counts / (i + 1)).sum()
        total = total + Z * y.logsumexp(-1).square().sum()
    want = torch.autograd.grad(total, weight)[0]
    for got in ranks(2).run(global_gradient):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


# --------------------------------------------------------------------------------------------- the statistics


def test_tokens_are_counted_once_also_under_recompute_and_never_in_evaluation():
    router, x = new_router(moe_expert_capacity_factor=1.0), torch.randn(6, 2, H, requires_grad=True)
    recompute(lambda x: router(x).probs, x).sum().backward()
    counts = router.tally[:E]
    assert counts.sum() == 2 * 12 and router.tally[E + 1] == 12 and router.microbatches == 1
    kept = torch.minimum(counts, torch.full((E,), 3.0, dtype=torch.float64)).sum()
    assert router.tally[E] == 24 - kept > 0
    with torch.no_grad():
        router(x)
    router.eval()(x).probs.sum().backward()
    assert router.microbatches == 1


def test_a_bias_evens_out_a_skewed_stream():
    """Tokens share a direction that some experts like; without the bias these get most of them, for ever."""
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

    def busiest(rate: float) -> list[float]:
        router = new_router(**fields, moe_router_bias_update_rate=rate)
        generator, found = torch.Generator().manual_seed(0), []
        skew = router.weight.detach()[:2].sum(0) / router.weight.detach().norm()
        for _ in range(150):
            x = torch.randn(128, 2, H, generator=generator) + 2 * skew
            router(x).probs.sum().backward()
            load = count_loads(router, Mesh.serial())
            move_biases(router, load)
            tokens = load.to_host()[0].tokens
            found.append(max(tokens) * E / sum(tokens))
        assert router.expert_bias.grad is None and not router.expert_bias.requires_grad
        return found

    moved, still = busiest(0.01), busiest(0.0)
    assert min(still) > 1.5, "the stream is skewed"
    assert moved[0] == still[0] and sum(moved[-20:]) / 20 < 1.2


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"moe_router_topk": 9}, "choose 1 to 8"),
        ({"moe_router_topk": 1}, "moe_router_pre_softmax=True"),
        ({"moe_router_enable_expert_bias": True}, "sigmoid"),
        ({"moe_router_num_groups": 4}, "give both"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "does not divide"),
        ({"moe_pad_expert_input_to_capacity": True}, "without a capacity"),
        ({"moe_layer_freq": "[0,0]", "num_layers": 2}, "no layer experts"),
        ({"moe_layer_freq": "([0]*3+[1]*58)"}, "says 61 layers"),
        ({"moe_layer_freq": "some"}, "neither a number nor a pattern"),
        ({"moe_shared_expert_overlap": True}, "without a shared expert"),
        ({"num_experts": None, "moe_z_loss_coeff": 0.1}, "without experts"),
        ({"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss")}, "one weight for each type"),
        ({"moe_aux_loss_coeff": (0.1, 0.2)}, "one weight for each type"),
        ({"moe_router_load_balancing_type": ("aux_loss", "none")}, "no list of different losses"),
        ({"moe_router_load_balancing_type": ("aux_loss", "auxloss")}, "is not one of"),
        ({"moe_aux_loss_coeff": -0.1}, "not negative"),
    ],
    ids=str,
)
def test_what_makes_no_router_is_refused(fields, words):
    with pytest.raises(ConfigError) as error:
        config(**fields)
    assert words in str(error.value)


# ------------------------------------------------------------------------------------------------------------- sinkhorn

ALONE = Mesh.serial().tp_cp
SINKHORN: dict[str, Any] = {"moe_router_load_balancing_type": "sinkhorn"}


def liked(tokens: int = 40, experts: int = 8, scale: float = 2.0) -> torch.Tensor:
    """All tokens like the first two experts."""
    x = scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(3))
    x[:, :2] += 2 * scale
    return x


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_megatrons():
    pytest.importorskip("megatron.core", reason="the oracle is optional")
    from megatron.core.transformer.moe.moe_utils import sinkhorn

    for x in (liked(), liked(7, 3, 0.5)):
        got, want = s.sinkhorn(x, ALONE), sinkhorn(x)
        torch.testing.assert_close(got.float(), want, rtol=1e-4, atol=1e-8)
        assert torch.equal(got.topk(2, -1).indices, want.topk(2, -1).indices)


def test_rows_and_columns_sum_to_equal_shares():
    table = s.sinkhorn(liked(), ALONE, tol=1e-9)
    for dim, parts in ((0, 8), (1, 40)):
        want = torch.full((parts,), 1 / parts, dtype=torch.float64)
        torch.testing.assert_close(table.sum(dim), want, rtol=1e-3, atol=0)


def test_large_logits_overflow_nothing():
    """e^90 is no fp32; Megatron's table would be NaN."""
    table = s.sinkhorn(liked(scale=150.0), ALONE)
    assert table.isfinite().all() and (table >= 0).all()
    torch.testing.assert_close(s.sinkhorn(liked() + 1000.0, ALONE), s.sinkhorn(liked(), ALONE), rtol=1e-3, atol=0)


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_are_dealt_out_in_training_and_choose_in_evaluation(k):
    x = liked(256, scale=1.0)
    weights, chosen = s.assign(x, k, ALONE)
    assert chosen.flatten().bincount(minlength=8).max() < 1.3 * 256 * k / 8
    scores = x.sigmoid() if k == 1 else x.softmax(-1)
    assert torch.equal(weights, scores.gather(1, chosen)), "weights are the logits' own"
    _, free = s.assign(x, k, None)
    assert torch.equal(free, scores.topk(k, -1).indices)
    assert free.flatten().bincount(minlength=8).max() > 1.8 * 256 * k / 8, "which all like the same"


def test_a_router_deals_out_while_it_learns():
    router = new_router(**SINKHORN).double()
    x = torch.randn(64, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    routing = router(x)
    routing.probs.sum().backward()
    assert routing.map.sum(0).max() < 1.3 * 128 * 2 / 8 < router.eval()(x).map.sum(0).max()
    assert router.weight.grad.norm() > 0


CASES = [
    Case(layout, {**EXPERTS, **SINKHORN, "moe_z_loss_coeff": 0.1, **more}, double=True, accumulation=2)
    for layout, more in (
        ({TP: 2, SP: True, EP: 2, ETP: 1}, {"moe_token_dispatcher_type": "alltoall"}),
        ({TP: 2, SP: True, CP: 2, EP: 4, ETP: 1}, {"recompute_granularity": "full"}),
        ({CP: 2, EP: 2}, {"moe_router_topk": 1}),
    )
]


def alone(rank: int, world: int) -> list[Any]:
    with mock.patch.object(s, "all_reduce", lambda x, axis: x * axis.size):
        return twin.compare_all(rank, world, CASES[:1])


@pytest.mark.thorough
def test_gradients_do_not_depend_on_the_layout(ranks):
    for reports in ranks(4).run(twin.compare_all, CASES, timeout=120):
        for one, report in zip(CASES, reports, strict=True):
            assert twin.problems(report, 1e-10) == [], one
    assert all(twin.problems(reports[0], 1e-6) for reports in ranks(4).run(alone)), "each rank for itself is seen"


def part_of_the_table(rank: int, world: int) -> bool:
    """Rows of uneven ranks: the first half of the tokens all like other experts than the second."""
    x = liked()
    x[20:] = x[20:].flip(1)
    axis = Mesh.build(ParallelConfig(context_parallel_size=world)).tp_cp
    mine = s.sinkhorn(x.chunk(world)[rank], axis)
    torch.testing.assert_close(mine, s.sinkhorn(x, ALONE).chunk(world)[rank], rtol=1e-9, atol=1e-12)
    return True


def test_ranks_balance_the_tokens_of_all(ranks):
    assert ranks(2).run(part_of_the_table) == [True, True]


def without_tokens(rank: int, world: int) -> tuple[int, int]:
    axis = Mesh.build(ParallelConfig(context_parallel_size=world)).tp_cp
    table = s.sinkhorn(torch.zeros(0, 4), axis)
    return len(table), int(c.all_reduce(torch.ones(()), axis))


def test_no_token_at_all_ends(ranks):
    assert ranks(2).run(without_tokens) == [(0, 2)] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_aux_loss_coeff": 0.1},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_router_topk_scaling_factor": 2.0},
    ],
    ids=str,
)
def test_what_would_move_the_choice_is_refused(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))) as error:
        config(**SINKHORN, **fields)
    assert "sinkhorn" in str(error.value) and error.value.fix
