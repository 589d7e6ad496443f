"""The heads of BERT: words that were masked, and whether two pieces of text belong together.

    words     z = E norm(gelu(W h_i + b)) + c          for every token i; E is the embedding's table, V' x h
    pair      u = W_2 tanh(W_1 h_0 + b_1) + b_2        of the first token, [CLS]; two classes

What is cut over tp, and what its gradient still needs:

| tensor          | on a rank of tp                | its gradient there                                             |
|-----------------|--------------------------------|----------------------------------------------------------------|
| W, b, the norm  | whole, applied to its tokens   | a sum over its own tokens with sequence parallelism: "sequence"|
| E, c            | V'/t rows                      | complete                                                       |
| W_1, b_1, W_2, b_2 | whole, applied to h_0       | complete: every rank has the same h_0                          |

With sequence parallelism h_0 is on the first rank alone. The others add zeros to it, one all-reduce of [b, h]; all then
compute the same loss, so the gradient of the sum is not summed again (`reduce_from_region`), and the first rank's
tokens alone receive it. Megatron-LM gathers all tokens for it.

The logits of the pair are computed in the model's precision, their loss in fp32, as in Megatron-LM.

Devlin et al. 2019 (arXiv 1810.04805), section 3.1. Megatron-LM: `megatron/core/models/bert/bert_lm_head.py`,
`pooler.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.kernels import ops
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig


class WholeLinear(nn.Module):
    """`y = x A^T + b`, the whole of A and b on every rank of tp.

    Args:
        config: initial values and dtype.
        input_size, output_size: i and o.
        partial: the sum that the gradients need, see `layers/param`.
    """

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int, partial: str = "") -> None:
        super().__init__()
        init = Init(std=config.init_method_std)
        shape = (output_size, input_size)
        self.weight = new_parameter(ParamLayout(shape, init=init, partial=partial), config.dtype)
        self.bias = new_parameter(ParamLayout((output_size,), partial=partial), config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., i] -> [..., o]."""
        return F.linear(x, self.weight, self.bias)


class BertLMHead(nn.Module):
    """norm(act(W h + b)), and c, the bias of the output layer.

    Args:
        config: sizes, activation and norm.
        mesh: its layout.

    Attributes:
        bias: c, this rank's [V'/t].
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        self.kind, self.kernels = config.activation, config.kernels
        self.dense = WholeLinear(config, config.hidden_size, config.hidden_size, partial="sequence")
        self.layernorm = Norm(config)
        size = config.padded_vocab_size(mesh.tp.size)
        parts = cut_evenly(size, mesh.tp, "the bias of the output layer")
        layout = ParamLayout((size,), 0, parts, mesh.tp.rank, rows=config.vocab_size)
        self.bias = new_parameter(layout, config.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or [s/t, b, h]) -> what the embedding's table is multiplied with, of the same shape."""
        return self.layernorm(ops.activation(self.kind, self.dense(hidden), kernels=self.kernels))  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """tanh(W_1 h_0 + b_1) of the first of a rank's tokens.

    Args:
        config: size and dtype.
        mesh: its layout.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = mesh.tp, mesh.sequence_parallel
        self.dense = WholeLinear(config, config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or [s/t, b, h]) -> [b, h], equal on all ranks of tp."""
        first = hidden[0]
        if self.sequence_parallel:
            first = c.reduce_from_region(first if self.tp.rank == 0 else first * 0.0, self.tp)
        return torch.tanh(self.dense(first))
