"""LayerNorm and RMSNorm, replicated over tp.

    LayerNorm:  y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta       over the last dim
    RMSNorm:    y =  x            / sqrt(mean(x^2) + eps) * gamma

Every tp rank holds gamma and beta. With sequence parallelism a rank sees only its own tokens, so their gradients are
partial sums; without it they are already complete. The norms of queries and keys see only a rank's own heads, so their
gradients are partial whenever tp > 1. Forgetting either sum changes the first gradient norm by 1.5 % or 0.0016 %, and
the loss curve invisibly (`parallel/data/finalize.py` does the sums, `tests/parallel` leaves them out on purpose).

Ba et al. 2016 (arXiv 1607.06450); Zhang and Sennrich 2019 (arXiv 1910.07467). Megatron-LM:
`megatron/core/transformer/torch_norm.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.kernels import ops
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.axis import Axis
    from minimegatron.config import TransformerConfig


class Norm(nn.Module):
    """`config.normalization` over the last dim, of size `hidden_size`.

    Args:
        config: kind, epsilon, dtype, and whether gamma is stored minus one.
        hidden_size: size of the last dim; default the model's.
        partial: which sum the gradient of gamma and beta needs ("sequence" or "heads").
    """

    def __init__(self, config: TransformerConfig, hidden_size: int | None = None, partial: str = "sequence") -> None:
        super().__init__()
        self.eps, self.kind = config.layernorm_epsilon, config.normalization
        self.zero_centered, self.kernels = config.layernorm_zero_centered_gamma, config.kernels
        # with dropout before the sum, or recompute of the norm alone, training adds in a pass of its own
        self.fuses_add = config.hidden_dropout == 0.0 and not config.recomputes("layernorm")
        shape = (hidden_size or config.hidden_size,)
        start = Init(value=0.0 if self.zero_centered else 1.0)
        self.weight = new_parameter(ParamLayout(shape, init=start, partial=partial), config.dtype)
        self.bias = (
            new_parameter(ParamLayout(shape, partial=partial), config.dtype) if self.kind == "LayerNorm" else None
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """[..., n] -> [..., n], statistics in fp32; with a residual (the norm of x + residual, x + residual)."""
        gamma: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if self.zero_centered:
            wide = torch.promote_types(gamma.dtype, torch.float32)
            if gamma.dtype != wide:  # 1 + gamma in 16 bits would lose what a gamma near 0 says
                h = x if residual is None else x + residual
                bias = None if bias is None else bias.to(wide)
                y = ops.norm(h.to(wide), gamma.to(wide) + 1, bias, self.eps, kernels=self.kernels).to(gamma.dtype)
                return y if residual is None else (y, h)
            gamma = gamma + 1
        if residual is None:
            return ops.norm(x.to(gamma.dtype), gamma, bias, self.eps, kernels=self.kernels)
        return ops.add_norm(x, residual, gamma, bias, self.eps, kernels=self.kernels)


class HeadsNorm(nn.Module):
    """RMSNorm of all heads of a token at once (OLMo 2); the heads and gamma are divided over tp.

        y = x / sqrt(mean(x^2) + eps) * gamma         the mean over all a d channels

    The sum of squares runs over all ranks, and each rank scales its own heads by it, so the gradient of the sum is a
    sum over ranks as well. One all-reduce of [s, b] in fp32 forward and one backward.

    OLMo et al. 2024 (arXiv 2501.00656), section 3.3.

    Args:
        config: epsilon, dtype, width of a head, and whether gamma is stored minus one.
        heads: number of heads on all ranks together.
        tp: the axis that shares them.

    Raises:
        ConfigError: heads cannot be divided over tp.
    """

    def __init__(self, config: TransformerConfig, heads: int, tp: Axis) -> None:
        super().__init__()
        self.eps, self.tp, self.width = config.layernorm_epsilon, tp, heads * config.kv_channels
        self.zero_centered = config.layernorm_zero_centered_gamma
        parts = cut_evenly(self.width, tp, f"HeadsNorm({self.width})")
        start = Init(value=0.0 if self.zero_centered else 1.0)
        self.weight = new_parameter(ParamLayout((self.width,), 0, parts, tp.rank, start), config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's heads [s, b, heads / t, d] -> the same shape, statistics in fp32."""
        wide = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))
        gamma = self.weight.to(wide.dtype) + 1 if self.zero_centered else self.weight
        squares = c.reduce_from_region(wide.square().sum(-1, keepdim=True), self.tp)
        squares = c.copy_to_region(squares, self.tp)  # each rank uses the sum for its own heads
        return (wide * torch.rsqrt(squares / self.width + self.eps) * gamma).to(x.dtype).view(x.shape)


def add_norm(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(h), h) of h = x + residual: one pass for a `Norm`, two for any other module."""
    if isinstance(norm, Norm) and (norm.fuses_add or not norm.training):
        return norm(x, residual)  # type: ignore[no-any-return]
    h = x + residual
    return norm(h), h
