"""One forward pass for generation: tokens in, logits of the places that are asked for out.

The problem in a sentence: training wants the loss of every token, generation the logits of one token a sequence, and
with 128 k words the others would cost more than a layer.

    tokens [b, n] -> embedding -> [n, b, h] -> layers, with a cache -> state of one place [1, b, h] -> logits [b, V]

Over tp a forward pass sends what training sends, `[n, b, h]` for the embedding and twice a layer, and at the end it
gathers the logits, `[b, V'/t]` from each rank: then all ranks hold the same numbers, and draw the same word.

| left out in generation         | why                                                                                |
|--------------------------------|------------------------------------------------------------------------------------|
| sequence parallelism           | one token cannot be cut; with it and for experts with tp, which need it, refused   |
| cp, pp, ep                     | refused: ranks that wait for each other at every token want a scheduler            |
| FP8, capacities of experts     | refused: what a sequence gets would depend on its neighbours in the batch          |

Megatron-LM: `megatron/core/inference/model_inference_wrappers/gpt`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from minimegatron.comm import collectives as c
from minimegatron.errors import ConfigError
from minimegatron.layers.attention import AttentionContext, KVCache, SelfAttention
from minimegatron.layers.core_attention import CoreAttention
from minimegatron.layers.mask import AttentionMask
from minimegatron.layers.mla import MultiLatentAttention
from minimegatron.models.decoder import GPTModel


class PassCache(KVCache, Protocol):
    """A cache during one forward pass over n new tokens of every sequence."""

    @property
    def position_ids(self) -> torch.Tensor:
        """[b, n], where the new tokens stand."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """[b, 1, n, m] as in `AttentionMask`; None where there are no earlier tokens."""
        ...


def check_can_generate(model: GPTModel) -> None:
    """Refuse a model that cannot generate here.

    Raises:
        ConfigError: its layout, its precision, its experts, the attention of a layer, or its training mode.
    """
    config, mesh = model.config, model.mesh
    for axis in (mesh.cp, mesh.pp, mesh.ep):
        if axis.size > 1:
            raise ConfigError(
                f"generation with {axis.name} = {axis.size}: it runs over tp and dp",
                fix=f"build the model with {axis.name} = 1; weights are loaded into any layout",
            )
    if mesh.sequence_parallel:
        experts = ", and experts with tp need it: tp = 1" if config.num_experts is not None else ""
        raise ConfigError(
            "generation with sequence_parallel: one token cannot be cut over the ranks of tp",
            fix=f"build the model with sequence_parallel=False{experts}; weights are loaded into any layout",
        )
    if config.fp8_format is not None:
        raise ConfigError(
            f"generation with fp8_format {config.fp8_format}: scales are those of a batch, so a sequence would depend "
            "on its neighbours",
            fix="build the model without fp8_format; the weights are the same",
        )
    if config.moe_expert_capacity_factor is not None:
        raise ConfigError(
            f"generation with moe_expert_capacity_factor {config.moe_expert_capacity_factor}: padding and neighbours "
            "would push tokens out of their experts",
            fix="moe_expert_capacity_factor=None: no token is dropped",
        )
    for number, layer in model.decoder.layers.items():
        attention = getattr(layer, "self_attention", None)
        core = getattr(attention, "core_attention", None)
        if type(attention) not in (SelfAttention, MultiLatentAttention) or type(core) is not CoreAttention:
            raise ConfigError(
                f"layer {number} has a {type(attention).__name__} with a {type(core).__name__}, which know no cache",
                fix="generate with decoder_layer_spec's own attention",
            )
    if any(hasattr(p, "placements") or p.numel() > p.untyped_storage().nbytes() for p in model.parameters()):
        raise ConfigError(
            "generation from shards of weights (ZeRO-3, FSDP2): no rank holds the model",
            fix="with ddp.whole_weights(): around the engine and its calls",
        )
    if model.training:
        raise ConfigError("generation in training mode: dropout would be part of the answer", fix="model.eval()")


def forward(model: GPTModel, tokens: torch.Tensor, cache: PassCache, at: torch.Tensor | None = None) -> torch.Tensor:
    """A pass over new tokens of every sequence, whose keys and values go into the cache.

    Args:
        model: see `check_can_generate`.
        tokens: [b, n] ids.
        cache: for n tokens: `StaticCache.prefill` or `next`.
        at: [b], which of the n each sequence wants logits of; default all.

    Returns:
        Logits of all V words on every rank, [b, n, V], or [b, 1, V] with `at`; fp32 or wider.
    """
    assert model.embedding is not None, "generation has the whole model on each rank"
    hidden = model.embedding(tokens, cache.position_ids)
    rotary = None if model.rotary is None else model.rotary(cache.position_ids)
    mask = AttentionMask(window=model.config.sliding_window, bias=cache.bias)
    hidden = model.decoder(hidden, AttentionContext(rotary, mask, cache))
    if at is not None:
        hidden = hidden.gather(0, at.view(1, -1, 1).expand(1, -1, hidden.shape[-1]))
    logits = c.gather_from_region(model.logits(hidden), model.mesh.tp)[..., : model.config.vocab_size]
    return logits.transpose(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
