"""Our stages and torch's own replicas take the same steps: `DistributedDataParallel`, `ZeroRedundancyOptimizer` and
`fully_shard`, on the same model, batches and AdamW; and all of them those of one process in fp64.

torch averages gradients over the ranks, which is the mean over tokens only where each counts as many. Here they do not,
so a rank's loss is multiplied by ranks/tokens, as a user of torch has to.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of, logical_parameters
from tests.parallel.test_zero import ADAM, DENSE, STAGES, STEPS, Weights, assert_same, batch_of, in_one_process, trained
from tests.thorough import mostly_thorough
from tests.twin import Case, losses, microbatch, serial_model

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
