"""The optimizer of a model: its parameters, the update that moves them, and the step that decides.

The problem in a sentence: the step (`optim/optimizer.py`) should read without AdamW, Muon and their kernels, so someone
else chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.layers.param import logical_parameters
from minimegatron.optim.algorithms import build_update
from minimegatron.optim.fused import NormReader
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
    chunks = [model] if isinstance(model, nn.Module) else model
    named = [(n, p) for chunk in chunks for n, p in logical_parameters(chunk) if p.requires_grad]
    fp16 = any(param.dtype == torch.float16 for _, param in named)
    if config.optimizer == "dist_muon":
        return _layer_wise(config, named, mesh, shards, kernels, fp16)
    params = [
        MainParam.of(name, param, mesh, config, None if shards is None else shards[name])
        for name, param in named
        if shards is None or name in shards
    ]
    return _with_update(params, config, mesh, kernels, fp16, publish)


def _layer_wise(
    config: OptimizerConfig,
    named: NamedParams,
    mesh: Mesh,
    shards: Mapping[str, Shard] | None,
    kernels: str,
    fp16: bool,
) -> MixedPrecisionOptimizer:
    """Over the parameters that this replica owns."""
    whole = LayerWise(named, mesh)
    params = [
        MainParam.of(name, param, mesh, config, None if shards is None else shards.get(name), owned=True)
        for name, param in named
        if name in whole.owned
    ]
    return _with_update(params, config, mesh, kernels, fp16, whole.publish)


def _with_update(
    params: list[MainParam], config: OptimizerConfig, mesh: Mesh, kernels: str, fp16: bool, publish: Callable[[], None]
) -> MixedPrecisionOptimizer:
    move, scaler = build_update(params, config, mesh, kernels), build_grad_scaler(config, fp16)
    return MixedPrecisionOptimizer(params, config, mesh, move, scaler, NormReader(kernels), publish)
