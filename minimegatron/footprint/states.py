"""Bytes that last from step to step: parameters, main parameters, gradients, moments.

| owner           | from                                                                                             |
|-----------------|--------------------------------------------------------------------------------------------------|
| parameters      | the model, built on torch's `meta` device for this rank's place                                    |
| gradients       | its buffers with their padding, built likewise by the data-parallel wrapper (`parallel/buckets`)   |
| main parameters | 4 bytes for each element of a 16-bit weight that this rank updates                                 |
| moments         | AdamW 8 bytes for each element that this rank updates, SGD 4 with momentum, Muon 4 of a matrix     |

With `dist_muon` a rank updates whole parameters, which are dealt out over the replicas (`optim/layer_wise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.param import layout_of
from minimegatron.optim.groups import rates_of
from minimegatron.optim.layer_wise import LayerWise
from minimegatron.parallel.ddp import DistributedDataParallel

# optimizer -> bytes of moments for an element of a matrix, and of any other parameter
MOMENTS: dict[str, Callable[[OptimizerConfig], tuple[int, int]]] = {
    "adam": lambda config: (8, 8),
    "sgd": lambda config: (4 * (config.sgd_momentum > 0),) * 2,
    "muon": lambda config: (4, 8),
    "dist_muon": lambda config: (4, 8),
}


def states(ddp: DistributedDataParallel, config: OptimizerConfig) -> dict[str, int]:
    """{owner: bytes} that last from step to step."""
    held = ddp.held()
    fleeting = {whole.untyped_storage()._cdata for whole in held.pop("communication", [])}
    found = {owner: _bytes(tensors, fleeting) for owner, tensors in held.items()}
    shards = ddp.shards()
    if config.optimizer == "dist_muon":
        owned = LayerWise(list(ddp.params.items()), ddp.mesh).owned
        shards = {name: shard for name, shard in shards.items() if name in owned}
    half = [s for s in shards.values() if s.data.dtype in (torch.bfloat16, torch.float16)]
    found["main parameters"] = 4 * sum(s.data.numel() for s in half)
    found["moments"] = sum(moments(config, name, ddp.params[name]) * s.data.numel() for name, s in shards.items())
    return {owner: nbytes for owner, nbytes in found.items() if nbytes}


def moments(config: OptimizerConfig, name: str, param: torch.Tensor) -> int:
    """Bytes for each element of a parameter that is updated."""
    of_matrix, of_rest = MOMENTS[config.optimizer](config)
    return of_matrix if config.has_matrices and rates_of(name, layout_of(param), config).matrix else of_rest


def fsdp2_states(model: nn.Module, mesh: Mesh, config: OptimizerConfig) -> dict[str, int]:
    """`fully_shard` cuts every parameter by rows, in fp32 whatever the model computes in."""
    count = 0
    for param in model.parameters():
        rows = math.ceil(param.shape[0] / mesh.dp_cp.size)
        mine = min(max(param.shape[0] - rows * mesh.dp_cp.rank, 0), rows)
        count += mine * (param.numel() // param.shape[0])
    return {"parameters": 4 * count, "gradients": 4 * count, "moments": MOMENTS[config.optimizer](config)[0] * count}


def _bytes(tensors: Iterable[torch.Tensor], without: set[int]) -> int:
    """Of storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for key, nbytes in storages.items() if key not in without)
