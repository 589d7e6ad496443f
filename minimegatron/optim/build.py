"""Build the optimizer of a model: choose the parameters of this rank, the algorithm and the grad scaler.

| `optimizer`         | matrices                     | the rest                                            |
|---------------------|------------------------------|-----------------------------------------------------|
| `adam`              | torch's AdamW                | the same                                            |
| `sgd`               | torch's SGD                  | the same                                            |
| `muon`, `dist_muon` | Muon (`optim/muon.py`)       | torch's AdamW                                       |

Two more choices: the dtype of the optimizer state (`optim/precision_aware.py`) and the device that holds it
(`optim/offload.py`). State is allocated here, so that a checkpoint can be loaded before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.errors import require
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.optim.groups import Rates
from minimegatron.optim.main_params import Chain, MainParam, Shard, TorchUpdate, Update
from minimegatron.optim.muon import LayerWise, Muon, NamedParams, Orthogonalizer
from minimegatron.optim.offload import Offloaded, first_of, on_host
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.optim.precision_aware import PrecisionAware
from minimegatron.optim.scaler import build_grad_scaler
from minimegatron.optim.torch_optimizers import SGD, AdamW


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
        config: the optimizer and its numbers.
        model: a model or the chunks of an interleaved pipeline, wrapped in DDP or not.
        mesh: this rank's place.
        shards: for a sharded optimizer: the part of each parameter that this rank alone updates, and its gradient
            (`DataParallel.shards`); other ranks update parameters that it does not name. Default: all of each.
        kernels: `config.kernels` of the model.
        publish: see `MixedPrecisionOptimizer`.
    """
    named = _trained(model)
    if config.optimizer == "dist_muon":
        publish = LayerWise(named, mesh).publish
    params = main_params(config, model, mesh, shards)
    fp16 = any(param.dtype == torch.float16 for _, param in named)
    update, scaler = build_update(params, config, mesh, kernels), build_grad_scaler(config, fp16)
    return MixedPrecisionOptimizer(params, config, mesh, update, scaler, kernels, publish)


def main_params(
    config: OptimizerConfig,
    model: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    shards: Mapping[str, Shard] | None = None,
) -> list[MainParam]:
    """The parameters of a model that this rank updates, whole or its shard of each.

    Args:
        config, model, mesh, shards: see `build_optimizer`.
    """
    named, whole = _trained(model), config.optimizer == "dist_muon"
    owned: Collection[str]
    if whole:
        owned = LayerWise(named, mesh).owned
    else:
        owned = {name for name, _ in named} if shards is None else shards
    return [
        MainParam.of(name, param, mesh, config, None if shards is None else shards.get(name), owned=whole)
        for name, param in named
        if name in owned
    ]


def _trained(model: nn.Module | Sequence[nn.Module]) -> NamedParams:
    chunks = [model] if isinstance(model, nn.Module) else model
    return [(n, p) for chunk in chunks for n, p in logical_parameters(chunk) if p.requires_grad]


def build_update(params: list[MainParam], config: OptimizerConfig, mesh: Mesh, kernels: str) -> Update:
    """The update that `config` asks for, with its state allocated."""
    if config.optimizer_cpu_offload:
        return _offloaded(params, config, kernels)
    if config.use_precision_aware_optimizer:
        return PrecisionAware(params, _groups(params, config), config)
    matrices, rest = [p for p in params if p.rates.matrix], [p for p in params if not p.rates.matrix]
    inner = _adam_or_sgd(rest, config)
    return TorchUpdate(params, Chain(_muon(matrices, config, mesh), inner) if config.has_matrices else inner, kernels)


def _adam_or_sgd(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    return _sgd(params, config) if config.optimizer == "sgd" else _adam(params, config)


def _offloaded(params: list[MainParam], config: OptimizerConfig, kernels: str) -> Update:
    """Offload the first parameters, in the order of the groups, until they make up the fraction."""
    ordered = [p for rates in _all_rates(params) for p in params if p.rates == rates]
    chosen = first_of([p.main.numel() for p in ordered], config.optimizer_offload_fraction)
    pairs = [(p, on_host(p, config.pin_cpu_params)) for p in ordered[:chosen]]
    host, others = [h for _, h in pairs], [p.with_copy() for p in ordered[chosen:]]
    kernels = "torch" if config.use_torch_optimizer_for_cpu_offload else kernels
    host_update = TorchUpdate(host, _adam_or_sgd(host, config), "torch")
    device_update = TorchUpdate(others, _adam_or_sgd(others, config), kernels)
    return Offloaded(pairs, host_update, others, device_update, config)


def _all_rates(params: list[MainParam]) -> list[Rates]:
    return list(dict.fromkeys([Rates(1.0), Rates(0.0), *(p.rates for p in params)]))


def _groups(params: list[MainParam], config: OptimizerConfig) -> list[dict[str, Any]]:
    """torch's parameter groups: with weight decay, without, and one for every other `Rates`."""
    return [
        {"params": [p.main for p in params if p.rates == rates], **rates.group(config)} for rates in _all_rates(params)
    ]


def _fused(params: list[MainParam]) -> bool:
    """Whether torch's fused optimizers can be used: they refuse meta tensors, which the planner uses."""
    return not any(p.main.is_meta for p in params)


def _adam(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    adam = AdamW(_groups(params, config), config.lr, betas, config.adam_eps, fused=_fused(params))
    for p in params:
        adam.state[p.main]["step"] = torch.zeros((), dtype=torch.float32, device=p.main.device)
    return _with_state(adam, params, "exp_avg", "exp_avg_sq")


def _sgd(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    sgd = SGD(_groups(params, config), config.lr, config.sgd_momentum, fused=_fused(params))
    return _with_state(sgd, params, *["momentum_buffer"] * bool(config.sgd_momentum))


def _muon(params: list[MainParam], config: OptimizerConfig, mesh: Mesh) -> torch.optim.Optimizer:
    for p in params:
        require(
            p.piece is None,
            f"optimizer='muon': this rank has a range of {p.name!r}, not a matrix",
            "no sharding of data parallelism with Muon; --optimizer dist_muon gives each replica whole matrices",
        )
    updates = {p.main: Orthogonalizer(p.name, layout_of(p.model), mesh, config) for p in params}
    groups = _groups(params, config)
    muon = Muon(groups, updates, config.lr, config.muon_momentum, config.muon_use_nesterov)
    return _with_state(muon, params, "momentum_buffer")


def _with_state(optimizer: torch.optim.Optimizer, params: list[MainParam], *names: str) -> torch.optim.Optimizer:
    for p in params:
        optimizer.state[p.main] |= {name: torch.zeros_like(p.main, requires_grad=False) for name in names}
    return optimizer
