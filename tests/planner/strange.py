"""A mixer that the package has never heard of: linear attention, softmax-free, with a state that is added up.

    y_i = sum_{j <= i} (phi(q_i) . phi(k_j)) v_j,        phi = elu + 1

Named by `--spec tests.planner.strange layers`; `asking` names one that reads its tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.collectives import copy_to_region, reduce_from_region
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec


class LinearAttention(nn.Module):
    """In place of `SelfAttention`, on this rank's heads."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: Any = None) -> None:
        super().__init__()
        self.d = config.kv_channels
        features = config.num_attention_heads * self.d
        how: dict[str, Any] = {"sequence_parallel": mesh.sequence_parallel, "bias": False, "dtype": config.dtype}
        self.inner = ColumnParallelLinear(
            config.hidden_size, 3 * features, mesh.tp, init=Init(std=config.init_method_std), blocks=3, **how
        )
        self.outer = RowParallelLinear(
            features, config.hidden_size, mesh.tp, init=Init(std=config.output_init_std), **how
        )

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]."""
        q, k, v = (t.unflatten(-1, (-1, self.d)) for t in self.inner(x).chunk(3, -1))  # [s, b, a', d]
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("sbad,sbae->sbade", k, v).cumsum(0)
        return self.outer(torch.einsum("sbad,sbade->sbae", q, state).flatten(2))


def layers(config: TransformerConfig) -> ModuleSpec:
    """The model's own layers with this mixer."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(LinearAttention))


class Gathering(LinearAttention):
    """Scales by a sum over the ranks of tp, in messages of its own, forward and backward."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, layer_number: int = 0, rng: Any = None) -> None:
        super().__init__(config, mesh, layer_number, rng)
        self.tp = mesh.tp

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        y = super().forward(x, context)
        return y * (1 + reduce_from_region(copy_to_region(y.mean(-1, keepdim=True), self.tp), self.tp))


def gathering(config: TransformerConfig) -> ModuleSpec:
    """The same, with two messages more."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(Gathering))


class Asking(LinearAttention):
    """Scales by a number that the host reads."""

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        return super().forward(x, context) * x.abs().max().item()


def asking(config: TransformerConfig) -> ModuleSpec:
    """The same, reading."""
    return decoder_layer_spec(config).with_submodule("self_attention", ModuleSpec(Asking))
