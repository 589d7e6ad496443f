"""Every stage of ZeRO, and FSDP2, takes the steps of one process with the same optimizer, in every layout.

The batch of every step is another one; ranks and microbatches count different numbers of tokens, norms are not 1 and
biases not 0 (`tests/twin`). Weights are compared after three steps of AdamW, which clips and decays.

An ordinary run has two layouts of every stage, on models of two layers: four replicas that share experts, and two
replicas with tp, sp and pp. The matrix (`--thorough`) has all layouts, on models of four layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch

from minimegatron.comm.fingerprints import check_copies
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import copy_axes, layout_of, logical_parameters
from minimegatron.optim.build import build_optimizer
from tests.axes import EP, PP, SP, TP
from tests.thorough import SLOW, mostly_thorough
from tests.twin import (
    Case,
    accumulate,
    distance,
    grad_of,
    parallel_model,
    serial_backward,
    serial_model,
    weights,
)

STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
STEPS = 3
ADAM = OptimizerConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.1, adam_eps=1e-6)
DENSE: dict[str, Any] = {
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "untie_embeddings_and_output_weights": False,
}
EXPERTS: dict[str, Any] = {
    "add_qkv_bias": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": "2",
    "moe_aux_loss_coeff": 0.02,
}
Weights = dict[str, torch.Tensor]


def batch_of(case: Case, step: int) -> Case:
    """The case with the data of a step."""
    return dataclasses.replace(case, seed=1000 + 17 * step)


def in_one_process(case: Case, dp: int) -> tuple[Weights, list[float]]:
    """Weights after the steps of one process, and the norms of their gradients."""
    whole = serial_model(case)
    optimizer = build_optimizer(ADAM, whole, Mesh.serial())
    norms = []
    for step in range(STEPS):
        serial_backward(whole, batch_of(case, step), dp)
        for param in whole.parameters():
            param.grad = grad_of(param)
        norms.append(optimizer.step().grad_norm or 0.0)
        optimizer.zero_grad()
    return {n: gather_logical(p, layout_of(p), Mesh.serial()) for n, p in logical_parameters(whole)}, norms


@functools.cache
def serial(model: str, dp: int, layers: int) -> tuple[Weights, list[float]]:
    """The twin of a layout's case."""
    return in_one_process(case_of(model, layers, {}), dp)


def case_of(model: str, layers: int, layout: dict[str, Any], **more: Any) -> Case:
    fields = DENSE if model == "dense" else EXPERTS
    return Case(layout, {"num_layers": layers, **fields}, accumulation=2, **more)


def trained(rank: int, world: int, case: Case) -> tuple[Weights, list[float]]:
    """Logical weights after the steps, of one rank of a stage; and the norms of their gradients."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(ADAM, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    norms = []
    for step in range(STEPS):
        accumulate(ddp, batch_of(case, step), mesh)
        norms.append(optimizer.step().grad_norm or 0.0)
    with ddp.whole_weights():
        held = dict(logical_parameters(ddp))
        check_copies({n: (p, copy_axes(layout_of(p), mesh)) for n, p in held.items()}, mesh.world)
        whole = {n: gather_logical(p, layout_of(p), mesh) for n, p in held.items()}
    return (whole if mesh.dp_cp.is_first and mesh.tp.is_first else {}), norms


def assert_same(results: list[tuple[Weights, list[float]]], want: Weights, norms: list[float], limit: float) -> None:
    """Every weight is on some rank, and everywhere that of one process."""
    assert set().union(*(held for held, _ in results)) == want.keys()
    off = {n: distance(w, want[n]) for held, _ in results for n, w in held.items()}
    assert {n: d for n, d in off.items() if not d <= limit} == {}
    for _, got in results:
        assert got == pytest.approx(norms, rel=20 * limit)


def layout_of_sizes(tp: int, pp: int, ep: int) -> dict[str, Any]:
    return ({TP: 2, SP: True} if tp > 1 else {}) | ({PP: 2} if pp > 1 else {}) | ({EP: 2} if ep > 1 else {})


SIZES = [
    (stage, dp, tp, pp, ep)
    for stage, dp, tp, pp, ep in itertools.product(STAGES, (2, 4), (1, 2), (1, 2), (1, 2))
    if dp * tp * pp <= 8
]
ORDINARY = ((4, 1, 1, 2), (2, 2, 2, 1))


def check(ranks: Any, world: int, dp: int, model: str, layers: int, layout: dict[str, Any], sharding: str) -> None:
    case = case_of(model, layers, layout, sharding=sharding)
    results = ranks(world).run(trained, case, timeout=300)
    assert_same(results, *serial(model, dp, layers), limit=1e-5)


EACH = {(stage, *ORDINARY[place % 2]) for place, stage in enumerate(STAGES) if stage != "no_shard"}
QUICK = {sizes for sizes in EACH if sizes[0] == "optim_grads"}


@pytest.mark.slow
@pytest.mark.parametrize("sharding, dp, tp, pp, ep", mostly_thorough(SIZES, EACH.__contains__, QUICK.__contains__))
def test_steps_are_those_of_one_process(ranks: Any, sharding: str, dp: int, tp: int, pp: int, ep: int) -> None:
    layers = 2 if (dp, tp, pp, ep) in ORDINARY else 4
    check(ranks, dp * tp * pp, dp, "experts" if ep > 1 else "dense", layers, layout_of_sizes(tp, pp, ep), sharding)


# ------------------------------------------------------------------------------------------------ instances (HSDP)

INSTANCES = "num_distributed_optimizer_instances"


@SLOW
@pytest.mark.parametrize(
    "sharding, layout, world",
    mostly_thorough(
        [
            (sharding, {**layout, INSTANCES: instances}, world)
            for sharding in STAGES[1:]
            for layout, instances, world in (
                ({}, 2, 4),
                ({}, 4, 4),
                ({EP: 2}, 2, 4),
                ({EP: 2}, 2, 8),
                ({TP: 2, SP: True, EP: 2}, 2, 8),
                ({PP: 2, EP: 2}, 2, 8),
            )
        ],
        lambda case: case[2] == 4 and EP in case[1] and case[0] == "optim_grads_params",
    ),
    ids=str,
)
def test_instances_take_the_steps_of_one_process(ranks: Any, sharding: str, layout: Any, world: int) -> None:
    dp = world // (layout.get(TP, 1) * layout.get(PP, 1))
    layers = 2 if world == 4 else 4
    check(ranks, world, dp, "experts" if EP in layout else "dense", layers, layout, sharding)


# ------------------------------------------------------------------------------ frozen, and without a gradient


@pytest.mark.slow
@pytest.mark.parametrize("sharding", mostly_thorough(STAGES, [3, 4], [3]))
def test_a_frozen_parameter_stays_and_one_without_gradient_decays(ranks: Any, sharding: str) -> None:
    """No loss depends on `unused`: its gradient is 0 in the buffer, as in Megatron, so AdamW takes its decay from it.

    torch alone skips a parameter whose `grad` is None; the twin has zeros.
    """
    case = case_of("dense", 2, {}, sharding=sharding, freeze=("*layers.0.mlp*",), unused=True)
    want, norms = in_one_process(case, 2)
    results = ranks(2).run(trained, case, timeout=300)
    assert_same(results, want, norms, limit=1e-5)
    begins, ended = weights(case.config, case.seed), results[0][0]
    frozen = [name for name in begins if "layers.0.mlp" in name]
    assert frozen and all(torch.equal(ended[name], begins[name]) for name in frozen)
    decayed = (1 - ADAM.lr * ADAM.weight_decay) ** STEPS
    unused = [ended[name] for name in ended if name.endswith("unused")]
    assert len(unused) == 2
    torch.testing.assert_close(torch.stack(unused), torch.full((2, 7, 3), decayed), rtol=1e-6, atol=0.0)
