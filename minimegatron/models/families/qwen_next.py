"""Qwen3-Next: Gated DeltaNet in three layers of four, gated attention in the fourth, experts in all.

| part          | of the family                                                                           |
|---------------|-----------------------------------------------------------------------------------------|
| linear layers | `layers/ssm/gated_delta_net`; two matrices of a file, head by head, are one here        |
| attention     | norms of q and k, RoPE of a quarter of a head, an output gate; `q_proj` has the gates,  |
|               | a head's after its queries                                                              |
| norms         | gamma is stored minus one, but not that of the gated norm                               |
| experts       | Qwen's, with a shared one behind a gate                                                 |

Published files have tensors of multi-token prediction (`mtp.`), which transformers does not read.

Qwen team 2025, "Qwen3-Next" (qwen.ai/blog); the layer: Yang et al., arXiv:2412.06464.
"""

from __future__ import annotations

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, named, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, T, sizes
from minimegatron.models.families.qwen import EXPERT_DEFAULTS, EXPERT_ROWS, EXPERTS, SHARED_ROWS

_LINEAR, _FULL = "linear_attention", "full_attention"
_SIZES = {
    name: name
    for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                 "linear_conv_kernel_dim")
}  # fmt: skip


def _read_layers(keys: Keys) -> Fields:
    layers, kinds, interval = int(keys["num_hidden_layers"]), keys["layer_types"], keys["full_attention_interval"]
    kinds = kinds or [_LINEAR if (i + 1) % interval else _FULL for i in range(layers)]
    if unknown := sorted(set(kinds) - {_LINEAR, _FULL}):
        raise ConfigError(f"layer_types {unknown[0]!r} is not supported", fix=f"of {_LINEAR}, {_FULL}")
    return {"linear_attention_freq": like.pattern([kind == _LINEAR for kind in kinds]) if _LINEAR in kinds else None}


def _write_layers(config: TransformerConfig) -> Fields:
    return {"layer_types": [_LINEAR if linear else _FULL for linear in config.linear_layers]}


_ATTENTION = (
    Row(like.ATTENTION[0].ours, like.qkv("weight"), "pack_gated"),
    *(row for row in like.ATTENTION[1:] if row.ours.endswith("weight")),
)
_NAMES = {"conv1d.weight": "conv1d.weight", "A_log": "A_log", "dt_bias": "dt_bias", "out_norm.weight": "norm.weight",
          "out_proj.weight": "out_proj.weight"}  # fmt: skip
_DELTA = (
    Row(L + "self_attention.in_proj.weight", tuple(T + f"linear_attn.in_proj_{x}.weight" for x in ("qkvz", "ba")),
        "delta"),
    *(Row(L + f"self_attention.{ours}", (T + f"linear_attn.{theirs}",)) for ours, theirs in _NAMES.items()),
)  # fmt: skip

register(
    Family(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        fields={
            **like.FIELDS,
            "layernorm_epsilon": 1e-6,
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "rotary_percent": 0.25,
            "linear_attention_freq": "4",
            "num_experts": 512,
            "moe_router_topk": 10,
            "moe_shared_expert_gate": True,
        },
        presets={
            "qwen3-next-80b-a3b": sizes(
                48, 2048, 16, 151936, num_query_groups=2, kv_channels=256, ffn_hidden_size=5120,
                moe_ffn_hidden_size=512, moe_shared_expert_intermediate_size=512, rotary_base=10_000_000.0,
                max_position_embeddings=262144,
            ),
        },
        defaults={
            **like.DEFAULTS,
            **EXPERT_DEFAULTS,
            "norm_topk_prob": True,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "layer_types": None,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        parts=(
            like.SIZES,
            only(hidden_act="silu"),  # which is also that of the convolution
            like.DROPOUT,
            like.rope("linear", "llama3", "yarn", partial=True),
            named(_SIZES),
            named({"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"}),
            Part(_read_layers, _write_layers),
            EXPERTS,
        ),
        tensors=(
            *like.ENDS,
            *like.on("self_attention", _ATTENTION),
            *like.on("gated_delta_net", _DELTA),
            *like.MLP,
            *EXPERT_ROWS,
            *SHARED_ROWS,
        ),
        left_out=lambda config: ("mtp.",),
    )
)  # fmt: skip
