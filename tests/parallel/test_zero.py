"""Every stage of ZeRO, and FSDP2, takes the steps of one process with the same optimizer, in every layout.

The batch of every step is another one; ranks and microbatches count different numbers of tokens, norms are not 1 and
biases not 0 (`tests/twin`). Weights are compared after 20 steps of AdamW, which clips and decays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.replicas import check_copies
from minimegatron.config import OptimizerConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import copy_axes, layout_of, logical_parameters
from minimegatron.optim.optimizer import build_optimizer
from tests.thorough import mostly_thorough
from tests.twin import Case, accumulate, distance, grad_of, parallel_model, serial_backward, serial_model

TP, SP, PP = "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"
EP = "expert_model_parallel_size"
STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
STEPS = 20
ADAM = OptimizerConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.1, adam_eps=1e-6)
DENSE: dict[str, Any] = {
    "num_layers": 4,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "untie_embeddings_and_output_weights": False,
}
EXPERTS: dict[str, Any] = {
    "num_layers": 4,
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


@functools.cache
def serial(model: str, dp: int, accumulation: int, double: bool = False) -> tuple[Weights, list[float]]:
    """Weights after the steps of one process, and the norms of their gradients."""
    case = case_of(model, {}, accumulation=accumulation, double=double)
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


def case_of(model: str, layout: dict[str, Any], **more: Any) -> Case:
    return Case(layout, DENSE if model == "dense" else EXPERTS, **more)


def trained(rank: int, world: int, case: Case, config: OptimizerConfig = ADAM) -> tuple[Weights, list[float]]:
    """Logical weights after the steps, of one rank of a stage; and the norms of their gradients."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
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
    assert set().union(*(weights for weights, _ in results)) == want.keys()
    off = {n: distance(w, want[n]) for weights, _ in results for n, w in weights.items()}
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
ORDINARY = {
    ("optim", 2, 1, 2, 2),
    ("optim_grads", 4, 1, 1, 2),
    ("optim_grads_params", 2, 2, 1, 2),
    ("optim_grads_params", 2, 1, 2, 1),
    ("fsdp2", 2, 2, 1, 1),
    ("fsdp2", 2, 1, 2, 2),
}


@pytest.mark.parametrize("sharding, dp, tp, pp, ep", mostly_thorough(SIZES, lambda sizes: sizes in ORDINARY))
def test_twenty_steps_are_those_of_one_process(ranks: Any, sharding: str, dp: int, tp: int, pp: int, ep: int) -> None:
    model = "experts" if ep > 1 else "dense"
    case = case_of(model, layout_of_sizes(tp, pp, ep), accumulation=2, sharding=sharding)
    assert_same(ranks(dp * tp * pp).run(trained, case, timeout=300), *serial(model, dp, 2), limit=1e-5)


# ------------------------------------------------------------------------------------------------ instances (HSDP)

INSTANCES = "num_distributed_optimizer_instances"


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
        lambda case: case[2] == 4 and EP in case[1] and case[0] in ("optim", "optim_grads_params", "fsdp2"),
    ),
    ids=str,
)
def test_instances_take_the_steps_of_one_process(ranks: Any, sharding: str, layout: Any, world: int) -> None:
    model = "experts" if EP in layout else "dense"
    case = case_of(model, layout, accumulation=2, sharding=sharding)
    dp = world // (layout.get(TP, 1) * layout.get(PP, 1))
    assert_same(ranks(world).run(trained, case, timeout=300), *serial(model, dp, 2), limit=1e-5)
