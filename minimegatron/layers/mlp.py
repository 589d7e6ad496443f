"""The MLP: a column-parallel layer, an activation, a row-parallel layer.

    y = act(x A^T + a) B^T + b            plain, f = 4h
    y = (silu(x G^T) * (x U^T)) B^T       gated: SwiGLU (GeGLU with gelu)

The activation is elementwise, so each rank applies it to its own f/t features and nothing travels between the two
matrices.

The gated form stores G and U as one matrix [G; U], one matrix product instead of two. A rank must hold *the same* rows
of both, so each half is cut by itself (`blocks=2`). Cutting the stacked matrix into equal blocks gives rank 0 of 2 all
the gates and no values; it runs, and trains another model.

Shazeer 2020 (arXiv 2002.05202). Megatron-LM: `megatron/core/transformer/mlp.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.kernels.switch import kernels
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}


class MLP(nn.Module):
    """Two matrices with an activation between them, plain or gated.

    Args:
        config: sizes, activation, bias.
        mesh: its layout.
        ffn_hidden_size: f; default the model's.
        column, row: classes of the linear layers; same signatures as those of `layers/linear.py`.

    Raises:
        ConfigError: f cannot be divided over tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        ffn_hidden_size: int | None = None,
        column: Callable[..., Any] = ColumnParallelLinear,
        row: Callable[..., Any] = RowParallelLinear,
    ) -> None:
        super().__init__()
        f = ffn_hidden_size or config.ffn_hidden_size
        self.gated, self.activation = config.gated_linear_unit, ACTIVATIONS[config.activation]
        self.kind, self.kernels = config.activation, config.kernels
        halves = 2 if self.gated else 1
        self.linear_fc1 = column(
            config.hidden_size,
            halves * f,
            mesh.tp,
            init=Init(std=config.init_method_std),
            bias=config.add_bias_linear,
            sequence_parallel=mesh.sequence_parallel,
            blocks=halves,
            dtype=config.dtype,
        )
        self.linear_fc2 = row(
            f,
            config.hidden_size,
            mesh.tp,
            init=Init(std=config.output_init_std),
            bias=config.add_bias_linear,
            sequence_parallel=mesh.sequence_parallel,
            dtype=config.dtype,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        return self.linear_fc2(self._activated(x))

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        """act(x A^T + a) or silu(x G^T) * (x U^T), [s, b, f/t]: by a fused kernel where there is one."""
        fc1 = self.linear_fc1
        ops = kernels(self.kernels, "activation", x, fc1.weight)
        if ops is not None and self.kind == "swiglu":
            return ops.swiglu(fc1(x))  # type: ignore[no-any-return]
        adds_bias = isinstance(fc1, ColumnParallelLinear) and fc1.bias is not None
        if ops is not None and adds_bias and self.kind in ("gelu", "gelu_tanh"):
            y = fc1.products.linear(x, fc1.weight, None, fc1.f)
            return ops.bias_gelu(y, fc1.bias, self.kind == "gelu_tanh")  # type: ignore[no-any-return]
        if self.gated:
            gate, up = fc1(x).chunk(2, -1)
            return self.activation(gate) * up
        return self.activation(fc1(x))
