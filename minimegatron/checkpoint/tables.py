"""Which tensors of Hugging Face's hold the numbers of which tensor of ours, family by family.

A row pairs one logical tensor of ours with tensors of theirs and names how they lie in it
(`checkpoint/huggingface.py`). `{}` stands for the layer's number. `{e}` stands for the number of an expert, over all
of which a row runs: published checkpoints store every expert by itself, we stack them.

| their name, published                                 | in transformers 5 while a model is in memory           |
|--------------------------------------------------------|--------------------------------------------------------|
| `mlp.experts.{e}.gate_proj`, `up_proj`, `down_proj`    | `mlp.experts.gate_up_proj`, `down_proj`, stacked       |
| `block_sparse_moe.experts.{e}.w1`, `w3`, `w2` (Mixtral)| the same                                               |

Both are read (`published` turns the second into the first), the first is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from minimegatron.config import TransformerConfig


class Row(NamedTuple):
    """One logical tensor of ours and what it is made of; `on` which layers: all, dense, or those with experts."""

    ours: str
    theirs: tuple[str, ...]
    how: str = "stack"
    when: Callable[[TransformerConfig], bool] = lambda config: True
    on: str = "all"


def _bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear


def _qkv_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear or config.add_qkv_bias


def _untied(config: TransformerConfig) -> bool:
    return config.untie_embeddings_and_output_weights


def _shared(config: TransformerConfig) -> bool:
    return config.moe_shared_expert_intermediate_size is not None


def _low_rank(config: TransformerConfig) -> bool:
    return config.q_lora_rank is not None


_L, _T = "decoder.layers.{}.", "model.layers.{}."

_ENDS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Row(_L + "input_layernorm.weight", (_T + "input_layernorm.weight",)),
    Row(_L + "pre_mlp_layernorm.weight", (_T + "post_attention_layernorm.weight",)),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), when=_untied),
)

_ATTENTION = (
    Row(_L + "self_attention.linear_qkv.weight", tuple(_T + f"self_attn.{x}_proj.weight" for x in "qkv"), "pack"),
    Row(
        _L + "self_attention.linear_qkv.bias", tuple(_T + f"self_attn.{x}_proj.bias" for x in "qkv"), "pack", _qkv_bias
    ),
    Row(_L + "self_attention.q_layernorm.weight", (_T + "self_attn.q_norm.weight",), when=lambda c: c.qk_layernorm),
    Row(_L + "self_attention.k_layernorm.weight", (_T + "self_attn.k_norm.weight",), when=lambda c: c.qk_layernorm),
    Row(_L + "self_attention.linear_proj.weight", (_T + "self_attn.o_proj.weight",)),
    Row(_L + "self_attention.linear_proj.bias", (_T + "self_attn.o_proj.bias",), when=_bias),
)

_LATENT = (
    Row(_L + "self_attention.linear_q_proj.weight", (_T + "self_attn.q_proj.weight",), when=lambda c: not _low_rank(c)),
    Row(_L + "self_attention.linear_q_down_proj.weight", (_T + "self_attn.q_a_proj.weight",), when=_low_rank),
    Row(_L + "self_attention.q_layernorm.weight", (_T + "self_attn.q_a_layernorm.weight",), when=_low_rank),
    Row(_L + "self_attention.linear_q_up_proj.weight", (_T + "self_attn.q_b_proj.weight",), when=_low_rank),
    Row(_L + "self_attention.linear_kv_down_proj.weight", (_T + "self_attn.kv_a_proj_with_mqa.weight",)),
    Row(_L + "self_attention.kv_layernorm.weight", (_T + "self_attn.kv_a_layernorm.weight",)),
    Row(_L + "self_attention.linear_kv_up_proj.weight", (_T + "self_attn.kv_b_proj.weight",)),
    Row(_L + "self_attention.linear_proj.weight", (_T + "self_attn.o_proj.weight",)),
)

_MLP = (
    Row(_L + "mlp.linear_fc1.weight", (_T + "mlp.gate_proj.weight", _T + "mlp.up_proj.weight"), on="dense"),
    Row(_L + "mlp.linear_fc1.bias", (_T + "mlp.gate_proj.bias", _T + "mlp.up_proj.bias"), when=_bias, on="dense"),
    Row(_L + "mlp.linear_fc2.weight", (_T + "mlp.down_proj.weight",), on="dense"),
    Row(_L + "mlp.linear_fc2.bias", (_T + "mlp.down_proj.bias",), when=_bias, on="dense"),
)


def _experts(their_layer: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Router and experts, whose three matrices have these names."""
    one = _T + their_layer + ".experts.{e}."
    fc1 = (f"{one}{gate}.weight", f"{one}{up}.weight")
    return (
        Row(_L + "mlp.router.weight", (_T + their_layer + ".gate.weight",), on="experts"),
        Row(_L + "mlp.experts.weight1", fc1, on="experts"),
        Row(_L + "mlp.experts.weight2", (f"{one}{down}.weight",), on="experts"),
    )


def _shared_experts(their_name: str) -> tuple[Row, ...]:
    """The MLP's rows, for the shared expert."""
    return tuple(
        row._replace(
            ours=row.ours.replace("mlp.", "mlp.shared_experts."),
            theirs=tuple(name.replace("mlp.", f"mlp.{their_name}.") for name in row.theirs),
            when=_shared,
            on="experts",
        )
        for row in _MLP
        if row.ours.endswith(".weight")
    )


_GATE = Row(_L + "mlp.shared_experts.gate_weight", (_T + "mlp.shared_expert_gate.weight",), on="experts")
_BIAS = Row(
    _L + "mlp.router.expert_bias",
    (_T + "mlp.gate.e_score_correction_bias",),
    when=lambda c: c.moe_router_enable_expert_bias,
    on="experts",
)
_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")

LLAMA_LIKE = (*_ENDS, *_ATTENTION, *_MLP)
MIXTRAL = (*_ENDS, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2"))
QWEN3_MOE = (*LLAMA_LIKE, *_experts(*_NAMES))
QWEN2_MOE = (*QWEN3_MOE, *_shared_experts("shared_expert"), _GATE)
DEEPSEEK_V3 = (*_ENDS, *_LATENT, *_MLP, *_experts(*_NAMES), *_shared_experts("shared_experts"), _BIAS)

_G = "transformer.h.{}."

GPT2 = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *(
        Row(_L + f"{ours}.{kind}", (_G + f"{theirs}.{kind}",))
        for ours, theirs in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2"))
        for kind in ("weight", "bias")
    ),
    Row(_L + "self_attention.linear_qkv.weight", (_G + "attn.c_attn.weight",), "conv_pack"),
    Row(_L + "self_attention.linear_qkv.bias", (_G + "attn.c_attn.bias",), "conv_pack"),
    Row(_L + "self_attention.linear_proj.weight", (_G + "attn.c_proj.weight",), "transpose"),
    Row(_L + "self_attention.linear_proj.bias", (_G + "attn.c_proj.bias",)),
    Row(_L + "mlp.linear_fc1.weight", (_G + "mlp.c_fc.weight",), "transpose"),
    Row(_L + "mlp.linear_fc1.bias", (_G + "mlp.c_fc.bias",)),
    Row(_L + "mlp.linear_fc2.weight", (_G + "mlp.c_proj.weight",), "transpose"),
    Row(_L + "mlp.linear_fc2.bias", (_G + "mlp.c_proj.bias",)),
    Row("decoder.final_layernorm.weight", ("transformer.ln_f.weight",)),
    Row("decoder.final_layernorm.bias", ("transformer.ln_f.bias",)),
    Row("output_layer.weight", ("lm_head.weight",), when=_untied),
)

TABLES = {
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
}


class Match(NamedTuple):
    """A row of the table for one layer, and of a stack for one expert."""

    ours: str
    expert: int | None
    theirs: tuple[str, ...]
    how: str


def matches(config: TransformerConfig, family: str) -> Iterator[Match]:
    """The family's table for this model: every layer that has a row, every expert."""
    layers = config.num_layers
    table = [row for row in TABLES[family] if row.when(config)]
    of_layers = [row for row in table if "{}" in row.ours]
    words = [row for row in table if row.ours.startswith("embedding.")]
    rest = [row for row in table if row not in of_layers and row not in words]
    for n, rows in ((-1, words), *((n, of_layers) for n in range(layers)), (layers, rest)):
        for row in rows:
            if row.on != "all" and config.has_experts(n) != (row.on == "experts"):
                continue
            theirs = tuple(name.replace("{}", str(n)) for name in row.theirs)
            experts = range(config.num_experts or 0) if "{e}" in theirs[0] else (None,)
            for e in experts:
                yield Match(row.ours.format(n), e, tuple(name.replace("{e}", str(e)) for name in theirs), row.how)


_STACKED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")


def published(state: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """A state dict with published names: stacks of experts taken apart (views), Mixtral's layer renamed."""
    found: dict[str, torch.Tensor] = {}
    mixtral = family == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in state.items():
        where = _STACKED.fullmatch(name)
        if where is None:
            found[re.sub(r"\.mlp\.gate\.", ".block_sparse_moe.gate.", name) if mixtral else name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            one = f"{where[1]}{'block_sparse_moe' if mixtral else 'mlp'}.experts.{e}."
            if where[2] == "down_proj":
                found[f"{one}{down}.weight"] = matrix
            else:
                found[f"{one}{gate}.weight"], found[f"{one}{up}.weight"] = matrix.chunk(2)
    return found
