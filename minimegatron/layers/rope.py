"""Rotary position embedding: position as an angle.

The problem in a sentence: attention compares a query and a key by their dot product, which knows nothing of where they
stand. Turn each pair of channels by an angle proportional to the position, and the dot product of two turned vectors
depends only on the *difference* of their positions:

    theta_i = base^(-2i/d)                    i = 0 .. d/2 - 1, slow for large i
    (x_i, x_{i+d/2})  ->  turned by  position * theta_i

Two conventions pair the channels: halves (i, i + d/2), used by Llama's weights in Hugging Face's form, and interleaved
(2i, 2i+1). They are the same up to a permutation of the rows of the query and key projections; mixing them up gives a
model that runs and knows nothing.

Longer contexts than trained: "linear" divides all positions; "llama3" (Llama 3.1) divides only the slow channels, whose
wavelength exceeds the trained context, keeps the fast ones, and blends between:

    wavelength = 2 pi / theta;  keep below original/high, divide by `factor` above original/low
    between: w = (original/wavelength - low) / (high - low);   theta' = (1 - w) theta/factor + w theta

RoPE has no parameters and needs no communication: every rank turns its own heads. Under context parallelism the angles
of a rank are those of its tokens' global positions.

Su et al. 2021 (arXiv 2104.09864). Megatron-LM: `megatron/core/models/common/embeddings/rotary_pos_embedding.py`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from minimegatron.config import TransformerConfig


def inverse_frequencies(config: TransformerConfig) -> torch.Tensor:
    """theta_i, [rotated channels / 2] in fp32, scaling applied."""
    d = int(config.kv_channels * config.rotary_percent)
    # int64 -> fp32 before the division, as Hugging Face does: the logits are compared to 1e-5 at long positions.
    theta = 1.0 / config.rotary_base ** (torch.arange(0, d, 2, dtype=torch.int64, device="cpu").float() / d)
    if config.rope_scaling_type == "linear":
        return theta / config.rope_scaling_factor
    if config.rope_scaling_type == "llama3":
        factor, original = config.rope_scaling_factor, config.rope_scaling_original_max_position_embeddings
        low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
        wavelength = 2 * math.pi / theta
        blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * theta / factor + blend * theta
    return theta


class RotaryEmbedding(nn.Module):
    """Angles for positions.

    Args:
        config: head width, base, rotated share, scaling.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [b, s] -> cos, sin, each [s, b, 1, rotated channels / 2] in fp32."""
        angle = position_ids.t()[..., None, None].float() * self.inv_freq
        return angle.cos(), angle.sin()


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Turn the first `2 * cos.shape[-1]` channels of every head.

    Args:
        x: [s, b, heads, d].
        cos, sin: [s, b or 1, 1, rotated / 2].
        interleaved: pairs (2i, 2i+1) instead of (i, i + rotated/2).
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    rotated = 2 * cos.shape[-1]
    turn, keep = x[..., :rotated], x[..., rotated:]
    if interleaved:
        a, b = turn[..., 0::2], turn[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turn.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return out if keep.shape[-1] == 0 else torch.cat((out, keep), -1)
