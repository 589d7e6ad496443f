"""Every stage of ZeRO, and FSDP2, takes the steps of one process with the same optimizer, in every layout.

The batch of every step is another one; ranks and microbatches count different numbers of tokens, norms are not 1 and
biases not 0 (`tests/twin`). Weights are compared after 10 steps of AdamW, which clips and decays.

An ordinary run has two layouts of every stage, on models of two layers: four replicas that share experts, and two
replicas with tp, sp and pp. The matrix (`--thorough`) has all layouts, on models of four layers.

Collectives are not compared between ranks here: that is a message more for each, and `test_zero_features` takes the
same paths with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from minimegatron.comm import collectives as c
from minimegatron.comm.fingerprints import check_copies
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import copy_axes, layout_of, logical_parameters
from minimegatron.optim.build import build_optimizer
from tests.thorough import mostly_thorough
from tests.twin import (
    Case,
    accumulate,
    distance,
    grad_of,
    losses,
    microbatch,
    parallel_model,
    serial_backward,
    serial_model,
    weights,
)

TP, SP, PP = "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"
EP = "expert_model_parallel_size"
STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
STEPS = 10
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


def in_one_process(case: Case, dp: int, steps: int = STEPS) -> tuple[Weights, list[float]]:
    """Weights after the steps of one process, and the norms of their gradients."""
    whole = serial_model(case)
    optimizer = build_optimizer(ADAM, whole, Mesh.serial())
    norms = []
    for step in range(steps):
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


def trained(rank: int, world: int, case: Case, steps: int = STEPS) -> tuple[Weights, list[float]]:
    """Logical weights after the steps, of one rank of a stage; and the norms of their gradients."""
    mesh = Mesh.build(case.parallel)
    ddp = parallel_model(case, mesh)
    optimizer = build_optimizer(ADAM, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    norms = []
    for step in range(steps):
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
    results = ranks(world, fingerprints=False).run(trained, case, timeout=300)
    assert_same(results, *serial(model, dp, layers), limit=1e-5)


EACH = {(stage, *ORDINARY[place % 2]) for place, stage in enumerate(STAGES) if stage != "no_shard"}


@pytest.mark.parametrize("sharding, dp, tp, pp, ep", mostly_thorough(SIZES, lambda sizes: sizes in EACH))
def test_ten_steps_are_those_of_one_process(ranks: Any, sharding: str, dp: int, tp: int, pp: int, ep: int) -> None:
    layers = 2 if (dp, tp, pp, ep) in ORDINARY else 4
    check(ranks, dp * tp * pp, dp, "experts" if ep > 1 else "dense", layers, layout_of_sizes(tp, pp, ep), sharding)


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
        lambda case: case[2] == 4 and EP in case[1] and case[0] in ("optim", "optim_grads_params"),
    ),
    ids=str,
)
def test_instances_take_the_steps_of_one_process(ranks: Any, sharding: str, layout: Any, world: int) -> None:
    dp = world // (layout.get(TP, 1) * layout.get(PP, 1))
    layers = 2 if world == 4 else 4
    check(ranks, world, dp, "experts" if EP in layout else "dense", layers, layout, sharding)


# ------------------------------------------------------------------------------ frozen, and without a gradient

FEW = 5  # steps


@pytest.mark.parametrize("sharding", STAGES)
def test_a_frozen_parameter_stays_and_one_without_gradient_decays(ranks: Any, sharding: str) -> None:
    """No loss depends on `unused`: its gradient is 0 in the buffer, as in Megatron, so AdamW takes its decay from it.

    torch alone skips a parameter whose `grad` is None; the twin has zeros.
    """
    case = case_of("dense", 2, {}, sharding=sharding, freeze=("*layers.0.mlp*",), unused=True)
    want, norms = in_one_process(case, 2, FEW)
    results = ranks(2, fingerprints=False).run(trained, case, FEW, timeout=300)
    assert_same(results, want, norms, limit=1e-5)
    begins, ended = weights(case.config, case.seed), results[0][0]
    frozen = [name for name in begins if "layers.0.mlp" in name]
    assert frozen and all(torch.equal(ended[name], begins[name]) for name in frozen)
    decayed = (1 - ADAM.lr * ADAM.weight_decay) ** FEW
    unused = [ended[name] for name in ended if name.endswith("unused")]
    assert len(unused) == 2
    torch.testing.assert_close(torch.stack(unused), torch.full((2, 7, 3), decayed), rtol=1e-6, atol=0.0)


CASE = Case({}, {"num_layers": 2, **DENSE}, accumulation=2)
Result = tuple[Weights, list[float]]


def by_torch(rank: int, world: int, case: Case, oracle: str) -> Result:
    """Weights after the steps, and norms of the gradients, of a plain model with torch's wrapper and optimizer."""
    mesh = Mesh.build(case.parallel)
    model = serial_model(case)
    named = dict(logical_parameters(model))
    layouts = {name: layout_of(param) for name, param in named.items()}  # `fully_shard` makes new parameters
    if oracle == "fully_shard":
        for layer in model.decoder.layers.values():
            fully_shard(layer, mesh=mesh.shard_mesh("dp"))
        whole: nn.Module = fully_shard(model, mesh=mesh.shard_mesh("dp"))
        named = dict(logical_parameters(model))
    else:
        whole = nn.parallel.DistributedDataParallel(model)
    how: dict[str, Any] = {"lr": ADAM.lr, "betas": (ADAM.adam_beta1, ADAM.adam_beta2), "eps": ADAM.adam_eps}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": ADAM.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if oracle == "ZeroRedundancyOptimizer":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **how)
    else:
        optimizer = torch.optim.AdamW(groups, **how)
    norms = []
    for step in range(STEPS):
        batches = [microbatch(batch_of(case, step), rank, i) for i in range(case.accumulation)]
        tokens = c.all_reduce(torch.stack([batch["loss_mask"].double().sum() for batch in batches]).sum(), mesh.dp)
        for i, batch in enumerate(batches):
            last = i == case.accumulation - 1
            with _without_sum(whole) if not last else contextlib.nullcontext():
                (losses(whole, batch).sum() * (world / tokens.item())).backward()
        norm = nn.utils.clip_grad_norm_(named.values(), ADAM.clip_grad)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    held = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in named.items()}
    return {n: gather_logical(p.detach(), layouts[n], Mesh.serial()) for n, p in held.items()}, norms


def _without_sum(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Gradients of this microbatch stay on the rank; `fully_shard` reduces each."""
    return contextlib.nullcontext() if isinstance(model, FSDPModule) else model.no_sync()  # type: ignore[no-any-return]


ORACLES = ("DistributedDataParallel", "ZeroRedundancyOptimizer", "fully_shard")


def both(rank: int, world: int, stage: str, double: bool) -> Result:
    """Of an oracle, or of one of our stages."""
    case = dataclasses.replace(CASE, double=double)
    if stage in ORACLES:
        return by_torch(rank, world, case, stage)
    return trained(rank, world, dataclasses.replace(case, sharding=stage))


@pytest.mark.parametrize("double, limit", mostly_thorough([(False, 1e-5), (True, 1e-11)], [0]))
def test_our_stages_torchs_own_and_one_process_take_the_same_steps(ranks: Any, double: bool, limit: float) -> None:
    """In fp32 within 1e-5 of fp64; in fp64, where only mistakes are visible, to the last digits."""
    want, norms = in_one_process(dataclasses.replace(CASE, double=True), 2)
    pool = ranks(2, fingerprints=False)
    for stage in (*ORACLES, *STAGES):
        results = pool.run(both, stage, double, timeout=300)
        assert results[0][0].keys() == want.keys(), stage
        assert_same(results, want, norms, limit)
