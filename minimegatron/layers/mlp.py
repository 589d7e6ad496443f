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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minimegatron.kernels import ops
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig


def activation_of(config: TransformerConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation between the two matrices, [..., f or 2 f] -> [..., f]."""
    act = partial(ops.activation, config.activation, kernels=config.kernels)
    if config.activation != "quick_geglu":
        return act
    return partial(act, offset=config.glu_linear_offset, limit=config.activation_func_clamp_value)


class MLP(nn.Module):
    """Two linear layers with an activation between them, plain or gated.

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
        self.kind, self.kernels = config.activation, config.kernels
        self.activation = activation_of(config)
        halves = 2 if config.gated_linear_unit else 1
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
        # whoever computes GELU says who adds the bias of fc1, where fc1 can leave it out
        has_bias = isinstance(self.linear_fc1, ColumnParallelLinear) and self.linear_fc1.bias is not None
        self.bias_gelu = has_bias and self.kind in ("gelu", "gelu_tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        fc1 = self.linear_fc1
        if self.bias_gelu:
            y = ops.bias_gelu(partial(fc1, x), fc1.bias, self.kind == "gelu_tanh", kernels=self.kernels)
        else:
            y = self.activation(fc1(x))  # [s, b, f/t]
        return self.linear_fc2(y)  # type: ignore[no-any-return]
