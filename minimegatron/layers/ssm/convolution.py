"""The causal convolution before a recurrence: a token is mixed with the few tokens before it, channel by channel.

    y_t = silu(bias + w_k x_t + w_{k-1} x_{t-1} + ... )        k taps of each channel

Beside what it convolves it is given the k - 1 tokens before (the *tail*): zeros where a sequence begins, another rank's
last tokens over cp, the last inputs of the step before in generation. With packed documents a tap that would reach
another document is left out.

mamba-ssm and Megatron-LM call `causal_conv1d`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter

if TYPE_CHECKING:
    from minimegatron.comm.axis import Axis
    from minimegatron.layers.ssm.pieces import Pieces


def uniform(z: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Normal numbers -> uniform ones between two numbers."""
    return low + (high - low) * torch.special.ndtr(z)


class CausalConv1d(nn.Module):
    """A convolution of each channel with its own past, and SiLU.

    Args:
        blocks: channels of each block (x, B and C of Mamba-2), which is cut over tp by itself.
        kernel: k taps.
        tp: the axis that shares the channels.
        dtype: of the taps.
        bias: whether there is one.
    """

    def __init__(self, blocks: tuple[int, ...], kernel: int, tp: Axis, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        channels, self.kernel = sum(blocks), kernel
        parts = cut_evenly(channels, tp, f"CausalConv1d({channels})", blocks)
        start = Init(std=1.0, of=partial(uniform, low=-(kernel**-0.5), high=kernel**-0.5))
        self.weight = new_parameter(ParamLayout((channels, 1, kernel), 0, parts, tp.rank, start), dtype)
        self.bias = new_parameter(ParamLayout((channels,), 0, parts, tp.rank, start), dtype) if bias else None

    def forward(
        self, x: torch.Tensor, tail: torch.Tensor, segments: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [s, b, channels] -> the same shape; and its input with the tail, [k - 1 + s, b, channels].

        Args:
            tail: [k - 1, b, channels], the tokens before; zeros where there are none.
            segments: [b, k - 1 + s], numbers of the documents of all of these; None for one document.
        """
        rows, n = torch.cat([tail, x]), len(x)
        if segments is None:
            y = F.conv1d(rows.permute(1, 2, 0), self.weight, self.bias, groups=len(self.weight))
            return F.silu(y.permute(2, 0, 1).contiguous()), rows
        y = x.new_zeros(()) if self.bias is None else self.bias
        y = y.to(torch.promote_types(x.dtype, torch.float32))
        for i in range(self.kernel):  # a tap in another document is left out
            same = segments[:, i : i + n] == segments[:, self.kernel - 1 :]
            y = torch.addcmul(y, rows[i : i + n] * same.t()[..., None], self.weight[:, 0, i])
        return F.silu(y).to(x.dtype), rows

    def over(self, pieces: Pieces, x: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens of this rank [s, b, channels] -> the same shape.

        Args:
            pieces: where they lie in the sequence.
            segments: [b, k - 1 + s] of the whole sequence.
        """
        parts, reach = pieces.cut(x), self.kernel - 1
        seen = [None if segments is None else segments[:, start : stop + reach] for start, stop in pieces.spans]
        return pieces.join([self(*of)[0] for of in zip(parts, pieces.tails(parts, reach), seen, strict=True)])

    def generated(self, x: torch.Tensor, tail: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens of r sequences [longest, r, channels] -> the same shape, and the next step's tail.

        Args:
            tail: [r, k - 1, channels].
            new: [r], how many of the tokens are no padding.
        """
        y, rows = self(x, tail.transpose(0, 1))
        last = torch.arange(tail.shape[1], device=new.device)[:, None] + new  # [k - 1, r]: each sequence's own
        return y, rows.gather(0, last[..., None].expand(-1, -1, rows.shape[2])).transpose(0, 1)


def segments_of(document_ids: torch.Tensor, before: int) -> torch.Tensor:
    """Numbers of the documents [b, before + s], those of a sequence in ascending order, and -1 before it."""
    changes = F.pad((document_ids.diff(dim=1) != 0).cumsum(1), (1, 0))
    return F.pad(changes, (before, 0), value=-1)
