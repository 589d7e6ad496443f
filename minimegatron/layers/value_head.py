"""A number for each token: the value of a state in PPO, the score of an answer in a reward model.

    v_t = w . x_t + b          x_t the last hidden state, after the final norm

The head reads hidden states where they lie. With sequence parallelism each rank has its own tokens and computes their
numbers, and then s b numbers are gathered; every rank of tp computes the same loss from them, so a number's gradient
is not summed, and the gradients of w and b are partial sums over the rank's tokens.

TRL: `AutoModelForCausalLMWithValueHead`; Hugging Face: `score` of `...ForSequenceClassification`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm.collectives import gather_from_sequence_region
from minimegatron.layers.param import Init, ParamLayout, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig


class ValueHead(nn.Module):
    """w and b; b begins at 0, w with a standard deviation of 1 / (h + 1), so that the first values are small.

    Args:
        config: size and dtype.
        mesh: its layout.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = mesh.tp, mesh.sequence_parallel
        row = ParamLayout(
            (1, config.hidden_size), init=Init(std=1 / (config.hidden_size + 1)), partial="sequence", added=True
        )
        self.weight = new_parameter(row, config.dtype)
        self.bias = new_parameter(ParamLayout((1,), partial="sequence", added=True), config.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or [s/t, b, h]) -> [b, s] in fp32."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)
        if self.sequence_parallel:
            values = gather_from_sequence_region(values, self.tp, reduce_gradient=False)
        return values.t()
