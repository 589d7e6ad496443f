"""Rotary position embedding: position as an angle.

The problem in a sentence: attention compares a query and a key by their dot product, which does not depend on their
positions. Rotate each pair of channels by an angle proportional to the position, and the dot product of two rotated
vectors depends only on the *difference* of their positions:

    theta_i = base^(-2i/d)                    i = 0 .. d/2 - 1, slow for large i
    (x_i, x_{i+d/2})  ->  rotated by  position * theta_i

Two conventions pair the channels: halves (i, i + d/2), used by Llama's weights in Hugging Face's form, and interleaved
(2i, 2i+1). They are the same up to a permutation of the rows of the query and key projections; a model with the wrong
one runs and gives nonsense.

Longer contexts than trained: "linear" divides all positions by a factor; the others divide only slow channels, whose
wavelength exceeds the trained context, keep the fast ones, and blend between. "llama3" (Llama 3.1) blends in the
wavelength, "yarn" in the channel's number i, between those that rotate `beta` times within the original context::

    llama3    wavelength = 2 pi / theta;  keep below original/high, divide by `factor` above original/low
              between: w = (original/wavelength - low) / (high - low);   theta' = (1 - w) theta/factor + w theta
    yarn      dim(beta) = d ln(original / (2 pi beta)) / (2 ln base)
              r = clamp((i - dim(fast)) / (dim(slow) - dim(fast)), 0, 1);   theta' = (1 - r) theta + r theta/factor

Gemma 3 has two bases: its layers with a window turn by one of their own, which no scaling changes, because what they
see is no farther away in a longer context.

YaRN also multiplies queries and keys (here: cos and sin) by 0.1 ln(factor) + 1, because scores over more keys spread.

With images a token has three positions (time, height, width), equal for text. "mrope" rotates each pair of channels by
one of them: the first section of channels by time, the next by height, the last by width (Qwen2-VL), or interleaved
channels (Qwen3-VL).

`ops.rope` rotates. RoPE has no parameters and needs no communication: every rank rotates its own heads. Under context
parallelism a rank uses the global positions of its tokens.

Su et al. 2021 (arXiv 2104.09864); Peng et al. 2023 (arXiv 2309.00071); Wang et al. 2024 (arXiv 2409.12191). In
Megatron-LM: `rotary_pos_embedding.py`, `yarn_rotary_pos_embedding.py` in `megatron/core/models/common/embeddings`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from minimegatron.config import TransformerConfig


def inverse_frequencies(config: TransformerConfig) -> torch.Tensor:
    """theta_i, [rotated channels / 2] in fp32, scaling applied."""
    d = config.rotary_channels
    # int64 -> fp32 before the division, as Hugging Face does: the logits are compared to 1e-5 at long positions.
    wave = config.rotary_base ** (torch.arange(0, d, 2, dtype=torch.int64, device="cpu").float() / d)
    theta = 1.0 / wave
    match config.rope_scaling_type:
        case "linear":
            return theta / config.rope_scaling_factor
        case "llama3":
            return _llama3(theta, config)
        case "yarn":
            return _yarn(wave, config, d)
    return theta


def _llama3(theta: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    factor, original = config.rope_scaling_factor, config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    wavelength = 2 * math.pi / theta
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * theta / factor + blend * theta


def _yarn(wave: torch.Tensor, config: TransformerConfig, d: int) -> torch.Tensor:
    """`wave` is 1 / theta. At position 100,000 the last bit matters, so the order of operations is Hugging Face's."""
    theta, base = 1.0 / wave, config.rotary_base
    original = config.rope_scaling_original_max_position_embeddings

    def channel(turns: float) -> float:
        return d * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = channel(config.yarn_beta_fast), channel(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 if first == last else 0.0  # a step, not a division by 0
    ramp = ((torch.arange(d // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0.0, 1.0)
    keep = 1 - ramp
    return 1.0 / (config.rope_scaling_factor * wave) * (1 - keep) + theta * keep


def attention_factor(config: TransformerConfig) -> float:
    """Factor of cos and sin: 1 except for YaRN."""
    if config.rope_scaling_type != "yarn":
        return 1.0

    def grown(mscale: float) -> float:
        return 1.0 if config.rope_scaling_factor <= 1 else 0.1 * mscale * math.log(config.rope_scaling_factor) + 1.0

    if not config.yarn_mscale:  # the paper's
        return grown(1.0)
    return grown(config.yarn_mscale) / grown(config.yarn_mscale_all_dim)


def position_of_channel(config: TransformerConfig) -> torch.Tensor:
    """mrope: for each pair of channels the position that rotates it, [rotated / 2]: 0 time, 1 height, 2 width."""
    assert config.mrope_section is not None, "the config has checked it"
    section = config.mrope_section
    if not config.mrope_interleaved:
        return torch.tensor([axis for axis in range(3) for _ in range(section[axis])], device="cpu")
    of = torch.zeros(sum(section), dtype=torch.int64, device="cpu")
    for axis in (1, 2):
        of[axis : 3 * section[axis] : 3] = axis
    return of


class RotaryEmbedding(nn.Module):
    """cos and sin of the rotation angles of positions.

    Args:
        config: head width, bases, rotated share, scaling, sections.
    """

    inv_freq: torch.Tensor
    local_inv_freq: torch.Tensor | None
    of_channel: torch.Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, self.factor = config, attention_factor(config)
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)
        local = None
        if config.rotary_base_local is not None:
            plain = {"rotary_base": config.rotary_base_local, "rope_scaling_type": "none"}
            local = inverse_frequencies(config.replace(**plain))
        self.register_buffer("local_inv_freq", local, persistent=False)
        if config.position_embedding_type == "mrope":
            self.register_buffer("of_channel", position_of_channel(config), persistent=False)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """position_ids [b, s], or [3, b, s] for mrope -> cos, sin, each [s, b, 1, rotated channels / 2] in fp32.

        With `rotary_base_local` also cos and sin of the layers with a window.
        """
        if self.config.position_embedding_type == "mrope":
            three = position_ids if position_ids.dim() == 3 else position_ids.expand(3, *position_ids.shape)
            place = three[self.of_channel].permute(2, 1, 0).unsqueeze(2).float()  # [s, b, 1, channels / 2]
        else:
            place = position_ids.t()[..., None, None].float()
        angle = place * self.inv_freq
        turns: tuple[torch.Tensor, ...] = angle.cos(), angle.sin()
        if self.factor != 1.0:
            turns = tuple(turn * self.factor for turn in turns)
        if self.local_inv_freq is None:
            return turns
        local = place * self.local_inv_freq
        return *turns, local.cos(), local.sin()
