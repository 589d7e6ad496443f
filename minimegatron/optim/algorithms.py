"""Which algorithm moves a parameter: AdamW, SGD or Muon, over main parameters in groups of equal rates.

| `optimizer`         | matrices                     | the rest                                            |
|---------------------|------------------------------|-----------------------------------------------------|
| `adam`              | torch's AdamW                | the same                                            |
| `sgd`               | torch's SGD                  | the same                                            |
| `muon`, `dist_muon` | Muon (`optim/muon.py`)       | torch's AdamW                                       |

State is allocated here and at once, so that a checkpoint can be loaded before the first step.
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
from minimegatron.optim.update import Chain, TorchUpdate, Update


def build_update(params: list[MainParam], config: OptimizerConfig, mesh: Mesh, kernels: str) -> Update:
    """What moves the main parameters, its state allocated at once, so that it can be saved and loaded."""
    matrices, rest = [p for p in params if p.rates.matrix], [p for p in params if not p.rates.matrix]
    inner = _sgd(rest, config) if config.optimizer == "sgd" else _adam(rest, config)
    return TorchUpdate(Chain(_muon(matrices, config, mesh), inner) if config.has_matrices else inner, kernels)


def _groups(params: list[MainParam], config: OptimizerConfig) -> list[dict[str, Any]]:
    """torch's groups: of those with and without weight decay, and of other rates."""
    kinds = dict.fromkeys([Rates(1.0), Rates(0.0), *(p.rates for p in params)])
    return [{"params": [p.main for p in params if p.rates == rates], **rates.group(config)} for rates in kinds]


def _adam(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    adam = torch.optim.AdamW(_groups(params, config), config.lr, betas, config.adam_eps, fused=True)
    for p in params:
        adam.state[p.main]["step"] = torch.zeros((), dtype=torch.float32, device=p.main.device)
    return _with_state(adam, params, "exp_avg", "exp_avg_sq")


def _sgd(params: list[MainParam], config: OptimizerConfig) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(_groups(params, config), config.lr, config.sgd_momentum, fused=True)
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
