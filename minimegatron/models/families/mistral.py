"""Mistral: Llama with a sliding window. Mixtral: the same with eight experts in every layer.

Mixtral's router is a softmax over the chosen. Its files have names of their own for the layer of experts, which
transformers 5 has given up for a model in memory.

Jiang et al., arXiv:2310.06825; Mixtral: arXiv:2401.04088.
"""

from __future__ import annotations

from minimegatron.config import TransformerConfig
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import sizes

_DEFAULTS = {
    **like.DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_PARTS = (like.SIZES, like.GATE, like.DROPOUT, like.WINDOW, like.rope("linear", "llama3", "yarn"))
_GROUPS = {"num_query_groups": 8}


def _read_experts(keys: Keys) -> Fields:
    return {
        "num_experts": int(keys["num_experts"]),
        "moe_router_topk": int(keys["num_experts_per_tok"]),
        "moe_input_jitter_eps": float(keys["router_jitter_noise"] or 0.0) or None,
    }


def _write_experts(config: TransformerConfig) -> Fields:
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "intermediate_size": config.moe_ffn_hidden_size,
        "router_jitter_noise": config.moe_input_jitter_eps or 0.0,
    }


register(
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        tensorrt_llm={},
        fields={**like.FIELDS, "sliding_window": 4096},
        presets={
            "mistral-7b": sizes(32, 4096, 32, 32000, ffn_hidden_size=14336, max_position_embeddings=32768, **_GROUPS),
        },
        defaults={**_DEFAULTS, "sliding_window": 4096},
        parts=_PARTS,
        tensors=like.DENSE,
    )
)

register(
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        fields={**like.FIELDS, "rotary_base": 1_000_000.0, "num_experts": 8, "moe_router_topk": 2},
        presets={
            "mixtral-8x7b": sizes(32, 4096, 32, 32000, ffn_hidden_size=14336, max_position_embeddings=32768, **_GROUPS),
            "mixtral-8x22b": sizes(
                56, 6144, 48, 32000, ffn_hidden_size=16384, max_position_embeddings=65536, **_GROUPS
            ),
        },
        defaults={
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
        },
        aliases={"num_local_experts": "num_experts"},
        parts=(*_PARTS, Part(_read_experts, _write_experts)),
        tensors=(*like.ENDS, *like.ATTENTION, *like.experts("block_sparse_moe", "w1", "w3", "w2")),
        renamed={".mlp.gate.": ".block_sparse_moe.gate."},
    )
)
