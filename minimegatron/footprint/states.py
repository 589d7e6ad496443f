"""Bytes that last from step to step: parameters, main parameters, gradients, moments.

| owner           | from                                                                                             |
|-----------------|--------------------------------------------------------------------------------------------------|
| parameters      | the model, built on torch's `meta` device for this rank's place                                    |
| gradients       | its buffers with their padding, built likewise by `parallel/data/ddp` (`parallel/data/buckets`)   |
| main parameters | the optimizer, built likewise over what this rank updates                                          |
| moments         | likewise; `... (host)` is the memory of the host (`--optimizer-cpu-offload`)                       |
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.ddp import DistributedDataParallel


def states(ddp: DistributedDataParallel, config: OptimizerConfig) -> dict[str, int]:
    """{owner: bytes} that last from step to step."""
    held = ddp.held()
    fleeting = {whole.untyped_storage()._cdata for whole in held.pop("communication", [])}
    found = {owner: _bytes(tensors, fleeting) for owner, tensors in held.items()}
    optimizer = build_optimizer(config, ddp, ddp.mesh, ddp.shards())
    found |= {owner: _bytes(tensors, set()) for owner, tensors in optimizer.held().items()}
    return {owner: nbytes for owner, nbytes in found.items() if nbytes}


def fsdp2_states(model: nn.Module, mesh: Mesh, config: OptimizerConfig) -> dict[str, int]:
    """`fully_shard` cuts every parameter by rows, in fp32 whatever the model computes in."""
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
    """Of storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for key, nbytes in storages.items() if key not in without)
