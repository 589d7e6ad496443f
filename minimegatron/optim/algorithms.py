"""Which algorithm moves a parameter: AdamW, SGD or Muon, over main parameters in groups of equal rates.

| `optimizer`         | matrices                     | the rest                                            |
|---------------------|------------------------------|-----------------------------------------------------|
| `adam`              | torch's AdamW                | the same                                            |
| `sgd`               | torch's SGD                  | the same                                            |
| `muon`, `dist_muon` | Muon (`optim/muon.py`)       | torch's AdamW                                       |

State is allocated at once, so that a checkpoint can be loaded before the first step. In which dtype and on which
device it is kept are the two other choices here (`optim/precision_aware.py`, `optim/offload.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.errors import require
from minimegatron.layers.param import layout_of
from minimegatron.optim.groups import Rates
from minimegatron.optim.main_params import MainParam
from minimegatron.optim.muon import Muon, Orthogonalizer
from minimegatron.optim.offload import Offloaded, first_of, on_host
from minimegatron.optim.precision_aware import PrecisionAware
from minimegatron.optim.update import Chain, TorchUpdate, Update


def build_update(params: list[MainParam], config: OptimizerConfig, mesh: Mesh, kernels: str) -> Update:
    """What moves the main parameters, its state allocated at once, so that it can be saved and loaded."""
    if config.optimizer_cpu_offload:
        return _offloaded(params, config, kernels)
    if config.use_precision_aware_optimizer:
        return PrecisionAware(params, _groups(params, config), config)
    matrices, rest = [p for p in params if p.rates.matrix], [p for p in params if not p.rates.matrix]
    inner = _elementwise(rest, config)
    return TorchUpdate(params, Chain(_muon(matrices, config, mesh), inner) if config.has_matrices else inner, kernels)


def _elementwise(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    return _sgd(params, config) if config.optimizer == "sgd" else _adam(params, config)


def _offloaded(params: list[MainParam], config: OptimizerConfig, kernels: str) -> Update:
    """The first of the groups' parameters are the host's, as many as make up the fraction."""
    ordered = [p for kind in _kinds(params) for p in params if p.rates == kind]
    chosen = first_of([p.main.numel() for p in ordered], config.optimizer_offload_fraction)
    pairs = [(p, on_host(p, config.pin_cpu_params)) for p in ordered[:chosen]]
    host, here = [h for _, h in pairs], [p.with_copy() for p in ordered[chosen:]]
    kernels = "torch" if config.use_torch_optimizer_for_cpu_offload else kernels
    updates = (
        TorchUpdate(host, _elementwise(host, config), "torch"),
        TorchUpdate(here, _elementwise(here, config), kernels),
    )
    return Offloaded(pairs, updates[0], here, updates[1], config)


def _kinds(params: list[MainParam]) -> list[Rates]:
    return list(dict.fromkeys([Rates(1.0), Rates(0.0), *(p.rates for p in params)]))


def _groups(params: list[MainParam], config: OptimizerConfig) -> list[dict[str, Any]]:
    """torch's groups: of those with and without weight decay, and of other rates."""
    return [{"params": [p.main for p in params if p.rates == rates], **rates.group(config)} for rates in _kinds(params)]


def _fused(params: list[MainParam]) -> bool:
    """torch refuses its fused optimizers to tensors without memory, whose bytes are planned."""
    return not any(p.main.is_meta for p in params)


def _adam(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    adam = torch.optim.AdamW(_groups(params, config), config.lr, betas, config.adam_eps, fused=_fused(params))
    for p in params:
        adam.state[p.main]["step"] = torch.zeros((), dtype=torch.float32, device=p.main.device)
    return _with_state(adam, params, "exp_avg", "exp_avg_sq")


def _sgd(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(_groups(params, config), config.lr, config.sgd_momentum, fused=_fused(params))
    return _with_state(sgd, params, *["momentum_buffer"] * bool(config.sgd_momentum))


def _muon(params: list[MainParam], config: OptimizerConfig, mesh: Mesh) -> torch.optim.Optimizer:
    for p in params:
        require(
            p.piece is None,
            f"optimizer='muon': of {p.name!r} a rank has a range, which is no matrix",
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
