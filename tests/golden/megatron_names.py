"""Weights and tokens from names and seeds: how two implementations start from the same numbers.

A comparison of two training runs needs equal weights, and nobody wants to commit weights. So each weight is drawn from
its own *name*: Megatron's global parameter name is hashed to a seed, the seed to the full, unsharded tensor::

    seed   = first 8 hex digits of md5(name)
    u      = numpy.random.RandomState(seed).random_sample(shape)       float64 in [0, 1)
    weight = (2 u - 1) * 0.05 * sqrt(3)                                standard deviation 0.05
           + 1 for the weight of a norm                                then cast to float32

No layout enters, so every layout cuts the same tensor. NumPy promises that `RandomState` keeps its stream for ever,
and `random_sample` uses exact arithmetic only, so the numbers are equal to the last bit on every machine.

The names are Megatron's, with the layer's global number::

    embedding.word_embeddings.weight                    [V, h]
    embedding.position_embeddings.weight                [positions, h]      position_embedding_type=learned_absolute
    decoder.layers.{i}.input_layernorm.weight, .bias    [h]                 .bias: LayerNorm only
    decoder.layers.{i}.self_attention.linear_qkv.weight [g (a/g + 2) d, h]  per group: its queries, its key, its value
    decoder.layers.{i}.self_attention.linear_qkv.bias                       add_bias_linear or add_qkv_bias
    decoder.layers.{i}.self_attention.q_layernorm.weight, k_layernorm [d]   qk_layernorm
    decoder.layers.{i}.self_attention.linear_proj.weight [h, a d]           .bias [h]
    decoder.layers.{i}.pre_mlp_layernorm.weight, .bias  [h]
    decoder.layers.{i}.mlp.linear_fc1.weight            [f, h]              gated: [2 f, h] = gate above up
    decoder.layers.{i}.mlp.linear_fc2.weight            [h, f]              .bias [h]
    decoder.final_layernorm.weight, .bias               [h]
    output_layer.weight                                 [V, h]              unless tied to the embedding
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch

STD = 0.05


def seeded_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The full fp32 tensor `shape` of the parameter with this name (see the module's formula)."""
    seed = int(hashlib.md5(name.encode()).hexdigest()[:8], 16)
    uniform = numpy.random.RandomState(seed).random_sample(shape)
    weight = (2 * uniform - 1) * (STD * 3**0.5)
    if "norm" in name and name.endswith(".weight"):
        weight = weight + 1
    return torch.from_numpy(weight.astype(numpy.float32))


def seeded_batches(recipe: Mapping[str, Any]) -> torch.Tensor:
    """Token ids `[microbatches, micro_batch_size, seq_length + 1]`, int64; inputs are `[..., :-1]`, labels `[..., 1:]`.

    Args:
        recipe: `data` of a frozen trace: seed, microbatches, micro_batch_size, seq_length, vocab_size.
    """
    shape = (recipe["microbatches"], recipe["micro_batch_size"], recipe["seq_length"] + 1)
    return torch.from_numpy(numpy.random.RandomState(recipe["seed"]).randint(0, recipe["vocab_size"], shape))


def parameter_shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Logical shape of every parameter of a model, by name, in Megatron's order.

    Args:
        model: `model` of a frozen trace: fields of `TransformerConfig`, all of those read here given.
    """
    h, a, g, d = (model[k] for k in ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"))
    f, vocab = model["ffn_hidden_size"], model["vocab_size"]
    gated = model["activation"] == "swiglu"
    bias, layer_norm = model["add_bias_linear"], model["normalization"] == "LayerNorm"
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, with_bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if with_bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = (width,)
        if layer_norm:
            shapes[f"{name}.bias"] = (width,)

    linear("embedding.word_embeddings", vocab, h, False)
    if model["position_embedding_type"] == "learned_absolute":
        linear("embedding.position_embeddings", model["max_position_embeddings"], h, False)
    for i in range(model["num_layers"]):
        layer = f"decoder.layers.{i}"
        norm(f"{layer}.input_layernorm", h)
        linear(f"{layer}.self_attention.linear_proj", h, a * d, bias)
        linear(f"{layer}.self_attention.linear_qkv", (a + 2 * g) * d, h, bias or model["add_qkv_bias"])
        if model["qk_layernorm"]:
            norm(f"{layer}.self_attention.q_layernorm", d)
            norm(f"{layer}.self_attention.k_layernorm", d)
        norm(f"{layer}.pre_mlp_layernorm", h)
        linear(f"{layer}.mlp.linear_fc1", 2 * f if gated else f, h, bias)
        linear(f"{layer}.mlp.linear_fc2", h, f, bias)
    norm("decoder.final_layernorm", h)
    if model["untie_embeddings_and_output_weights"]:
        linear("output_layer", vocab, h, False)
    return shapes


def seeded_state_dict(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every logical parameter of a model, by name."""
    return {name: seeded_weight(name, shape) for name, shape in parameter_shapes(model).items()}
