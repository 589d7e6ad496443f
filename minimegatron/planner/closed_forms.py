"""Closed formulas that papers print for their model and kernels: a GPT with an MLP of width 4 h, in 16 bits.

A reader can check them by hand, and tests compare a plan's numbers with them. A plan itself runs the layers
(`footprint`, `traffic`) with this package's kernels: the papers count dropout masks of one byte and no log-sum-exp.

L layers, h hidden size, a heads, s tokens, b samples of a microbatch, t ranks of tp, V words, p stages, m microbatches,
v chunks a rank, B samples of a batch, D data-parallel ranks.

| what                  | formula                                               | from                       |
|-----------------------|-------------------------------------------------------|----------------------------|
| bubble / ideal time   | (p - 1) / (v m)                                       | arXiv 2104.04473, 2.2      |
| parameters            | 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h))           | 2104.04473, equation 2     |
| model FLOPs of a step | 72 B L s h^2 (1 + s/(6 h) + V/(12 h L))               | 2205.05198, appendix A     |
| hardware, selective   | 72 B L s h^2 (1 + s/(3 h) + V/(12 h L))               | the same                   |
| hardware, full        | 96 B L s h^2 (1 + s/(6 h) + V/(16 h L))               | 2104.04473, equation 3     |

**Conventions of FLOPs.** A multiplication and an addition count as two. *Model* FLOPs are those of the formula of the
model; *hardware* FLOPs include recompute. MFU and HFU are their shares of the peak. Papers before 2023 count the full
square of attention; Megatron's log line and this package (`training/flops`) count half of it.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError, did_you_mean, require
from minimegatron.kernels import ops
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec

# Bytes of a layer over s b h, where x = 5 a s / h is what a core attention that keeps its weights keeps.
ACTIVATIONS = {
    "none": lambda t, x: 34 + x,
    "tp": lambda t, x: 10 + 24 / t + x / t,
    "tp sp": lambda t, x: (34 + x) / t,
    "tp selective": lambda t, x: 10 + 24 / t,
    "tp sp selective": lambda t, x: 34 / t,
    "full": lambda t, x: 2.0,
    "full sp": lambda t, x: 2 / t,
}
# Precision -> bytes of a parameter, of its gradient, of what the optimizer keeps for it.
FLAVOURS = {
    "zero": (2, 2, 12),  # as arXiv 1910.02054 counts
    "fp16, fp16 gradients": (2, 2, 16),
    "bf16, fp32 gradients": (2, 4, 12),
    "fp32": (4, 4, 8),
}


def bubble(p: int, m: int, v: int = 1) -> Fraction:
    """Bubble time over ideal time of GPipe, 1F1B and interleaved 1F1B."""
    return Fraction(p - 1, v * m)


def parameters(layers: int, h: int, vocab: int, s: int) -> float:
    """Parameters of a GPT with learned positions and a tied output layer."""
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + s) / (12 * layers * h))


def model_flops(batch: int, s: int, layers: int, h: int, vocab: int) -> float:
    """Model FLOPs of a step, with the full square of attention."""
    return 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))


def hardware_flops(batch: int, s: int, layers: int, h: int, vocab: int, recompute: str = "none") -> float:
    """Hardware FLOPs of a step; `recompute` is "none", "selective" (the core attention) or "full" (every layer)."""
    if recompute == "none":
        return model_flops(batch, s, layers, h, vocab)
    if recompute == "selective":
        return 72 * batch * layers * s * h**2 * (1 + s / (3 * h) + vocab / (12 * h * layers))
    _known(recompute, ("none", "selective", "full"))
    return 96 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * h * layers))


def layer_activations(method: str, s: int, b: int, h: int, a: int, t: int = 1) -> float:
    """Bytes of activations that a rank keeps of one layer and microbatch; `method` is a key of `ACTIVATIONS`."""
    _known(method, ACTIVATIONS)
    return s * b * h * ACTIVATIONS[method](t, 5 * a * s / h)


def state_bytes(params: float, replicas: int, zero: int, flavour: str = "bf16, fp32 gradients") -> float:
    """Bytes of parameters, gradients, main parameters and Adam's moments of a rank, each sharded evenly or not at all.

    Args:
        params: parameters of this rank's part of the model.
        replicas: D.
        zero: ZeRO stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
        flavour: a key of `FLAVOURS`.
    """
    _known(flavour, FLAVOURS)
    parts = zip(FLAVOURS[flavour], (3, 2, 1), strict=True)
    return params * sum(nbytes / (replicas if zero >= stage else 1) for nbytes, stage in parts)


def sent(collective: str, elements: float, ranks: int) -> float:
    """Elements that each rank of a ring sends, for a tensor of `elements` elements over all ranks."""
    return elements * (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)


def tensor_parallel_volume(s: int, b: int, h: int, t: int, regathered: bool = False) -> float:
    """Elements that a rank sends for a layer, forward and backward.

    Four all-reduces; with sequence parallelism each is a reduce-scatter and an all-gather, and the inputs of two
    products are gathered once more for their weights' gradients (`regathered`).
    """
    return 4 * sent("all_reduce", b * s * h, t) + (2 * sent("all_gather", b * s * h, t) if regathered else 0.0)


def crossover_tokens(h: int) -> float:
    """Tokens b s of a rank below which tp moves less than ZeRO-3 moves weights: 8 b s h = 3 * 12 h^2."""
    return 4.5 * h


def in_flight(schedule: str, p: int, m: int, rank: int) -> int:
    """Microbatches whose activations a rank of `1f1b` or `gpipe` holds at most."""
    _known(schedule, ("1f1b", "gpipe"))
    return m if schedule == "gpipe" else min(m, p - rank)


def _known(word: str, words: object) -> None:
    names = list(words)  # type: ignore[call-overload]
    if word not in names:
        raise ConfigError(f"no {word!r}", fix=did_you_mean(word, names) or f"choose among {', '.join(names)}")


class FusedSoftmax(CoreAttention):
    """Megatron-LM's attention before FlashAttention: all attention weights are stored; one kernel scales, masks and
    softmaxes.

    For `attention_backend reference`, on one rank of cp. Megatron-LM: `megatron/core/fusions/fused_softmax.py`.
    """

    def _reference(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, sink: torch.Tensor | None = None
    ) -> torch.Tensor:
        require(sink is None, f"softmax_type {self.config.softmax_type} in FusedSoftmax", "softmax_type=vanilla")
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.transpose(-1, -2)
        weights = ops.scaled_softmax(scores, self.scale, causal=mask.causal, kernels=self.config.kernels)
        return self.dropout(weights) @ v  # type: ignore[no-any-return]


def fused_softmax(config: TransformerConfig) -> ModuleSpec:
    """The layer spec (`--spec`) of runs that were published before 2023."""
    layer = decoder_layer_spec(config)
    attention = layer.submodules["self_attention"]
    params = {**attention.params, "core_attention": FusedSoftmax}
    return layer.with_submodule("self_attention", ModuleSpec(attention.module, params, attention.submodules))
