"""The optimizer of a model: its parameters, the update that moves them, and the step that decides.

The problem in a sentence: the step (`optim/optimizer.py`) should read without AdamW, Muon and their kernels, so someone
else chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.param import logical_parameters
from minimegatron.optim.algorithms import build_update
from minimegatron.optim.layer_wise import LayerWise, NamedParams
from minimegatron.optim.main_params import MainParam, Shard
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.scaler import build_grad_scaler


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    shards: Mapping[str, Shard] | None = None,
    kernels: str = "torch",
    publish: Callable[[], None] = lambda: None,
) -> MixedPrecisionOptimizer:
    """The optimizer of this rank's trainable parameters, with the grad scaler that their precision needs.

    Args:
        config: names the optimizer and its numbers.
        model: a model or the chunks of an interleaved pipeline, wrapped in DDP or not.
        mesh: this rank's place.
        shards: for a sharded optimizer: the part of each parameter that this rank alone updates, and its gradient
            (`DistributedDataParallel.shards`); parameters that are not named are left to others. Default: all of each.
        kernels: `config.kernels` of the model.
        publish: see `MixedPrecisionOptimizer`.
    """
    named = _trained(model)
    if config.optimizer == "dist_muon":
        publish = LayerWise(named, mesh).publish
    params = main_params(config, model, mesh, shards)
    fp16 = any(param.dtype == torch.float16 for _, param in named)
    move, scaler = build_update(params, config, mesh, kernels), build_grad_scaler(config, fp16)
    return MixedPrecisionOptimizer(params, config, mesh, move, scaler, kernels, publish)


def main_params(
    config: OptimizerConfig,
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    shards: Mapping[str, Shard] | None = None,
) -> list[MainParam]:
    """What this rank updates of a model: each parameter, or the part of it, as the optimizer sees it.

    Args:
        config, model, mesh, shards: see `build_optimizer`.
    """
    named, whole = _trained(model), config.optimizer == "dist_muon"
    mine: Collection[str] = (
        LayerWise(named, mesh).owned if whole else {n for n, _ in named} if shards is None else shards
    )
    return [
        MainParam.of(name, param, mesh, config, None if shards is None else shards.get(name), owned=whole)
        for name, param in named
        if name in mine
    ]


def _trained(model: nn.Module | Sequence[nn.Module]) -> NamedParams:
    chunks = [model] if isinstance(model, nn.Module) else model
    return [(n, p) for chunk in chunks for n, p in logical_parameters(chunk) if p.requires_grad]
