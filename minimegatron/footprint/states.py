"""What a rank holds from step to step, in bytes: parameters, gradients, main parameters and moments.

Nothing is computed by formula: the rank's part of the model, its gradient buffers with their padding and its optimizer
are built on torch's `meta` device, where tensors have shapes and no memory, and are asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig, TransformerConfig
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import build_chunks
from minimegatron.models.spec import ModuleSpec
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.groups import frozen, train_added
from minimegatron.parallel.data.ddp import DistributedDataParallel


def meta_model(
    config: TransformerConfig, mesh: Mesh, optimizer: OptimizerConfig, spec: ModuleSpec | None = None
) -> Any:
    """This rank's part of the model, on the `meta` device."""
    with torch.device("meta"):
        model = build_chunks(config, mesh, spec)
    for name, param in logical_parameters(model):
        param.requires_grad_(param.requires_grad and not frozen(name, optimizer))
    if config.lora_rank is not None:
        train_added(model)
    return model


def meta_wrapper(model: Any, mesh: Mesh, optimizer: OptimizerConfig) -> DistributedDataParallel:
    """The model in its data-parallel wrapper, with the buckets of its gradients."""
    parallel = mesh.parallel
    return DistributedDataParallel(
        model,
        mesh,
        parallel.ddp_bucket_size,
        parallel.overlap_grad_reduce,
        sharding=parallel.data_parallel_sharding_strategy,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_dtype=optimizer.grad_dtype,
    )


def planned_model(
    config: TransformerConfig, mesh: Mesh, optimizer: OptimizerConfig, spec: ModuleSpec | None = None
) -> DistributedDataParallel:
    """The `meta_model` of a rank of a planned mesh, in its wrapper.

    A plan asks the same rank for its memory, its messages and its time, so the last few of known layers are kept.
    """
    if spec is None:
        return _planned_model(config, mesh.parallel, mesh.rank, mesh.world.size, optimizer)
    return meta_wrapper(meta_model(config, mesh, optimizer, spec), mesh, optimizer)


@functools.lru_cache(maxsize=4)
def _planned_model(
    config: TransformerConfig, parallel: ParallelConfig, rank: int, world: int, optimizer: OptimizerConfig
) -> DistributedDataParallel:
    mesh = Mesh.planned(parallel, rank, world)
    return meta_wrapper(meta_model(config, mesh, optimizer), mesh, optimizer)


def states(ddp: DistributedDataParallel, config: OptimizerConfig) -> dict[str, int]:
    """{owner: bytes} that a rank holds from step to step."""
    held = ddp.held()
    fleeting = {whole.untyped_storage()._cdata for whole in held.pop("communication", [])}
    found = {owner: _bytes(tensors, fleeting) for owner, tensors in held.items()}
    optimizer = build_optimizer(config, ddp, ddp.mesh, ddp.shards())
    found |= {owner: _bytes(tensors, set()) for owner, tensors in optimizer.held().items()}
    return {owner: nbytes for owner, nbytes in found.items() if nbytes}


def fsdp2_states(model: nn.Module, mesh: Mesh, config: OptimizerConfig) -> dict[str, int]:
    """`states` of torch's FSDP2: `fully_shard` cuts every parameter by rows, in fp32 whatever the model computes in."""
    count = 0
    for param in model.parameters():
        rows = math.ceil(param.shape[0] / mesh.dp_cp.size)
        mine = min(max(param.shape[0] - rows * mesh.dp_cp.rank, 0), rows)
        count += mine * (param.numel() // param.shape[0])
    moments = sum({"fp32": 4, "fp8": 1}.get(dtype, 2) for dtype in (config.exp_avg_dtype, config.exp_avg_sq_dtype))
    if config.optimizer != "adam":
        moments = 4 * (config.sgd_momentum > 0)
    return {"parameters": 4 * count, "gradients": 4 * count, "moments": moments * count}


def _bytes(tensors: Iterable[torch.Tensor], without: set[int]) -> int:
    """Bytes of the tensors' storages, each storage counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for key, nbytes in storages.items() if key not in without)
