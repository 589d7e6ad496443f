"""Llama 1 to 3.1: RMSNorm, RoPE, a gated MLP, no biases; since Llama 2 grouped queries, in 3.1 a stretched RoPE.

Touvron et al. 2023, arXiv:2302.13971; Touvron et al. 2023, Llama 2, arXiv:2307.09288; Llama 3: arXiv:2407.21783.
"""

from __future__ import annotations

from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, register
from minimegatron.models.families.llama_like import sizes

_ROPE = {
    "rotary_base": 500_000.0,
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "max_position_embeddings": 131_072,
}
_OF_2 = {"max_position_embeddings": 4096}
_OF_3 = {"num_query_groups": 8, **_ROPE}

LLAMA = register(
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        tensorrt_llm={},
        fields=like.FIELDS,
        presets={
            "llama2-7b": sizes(32, 4096, 32, 32000, ffn_hidden_size=11008, **_OF_2),
            "llama2-70b": sizes(80, 8192, 64, 32000, num_query_groups=8, ffn_hidden_size=28672, **_OF_2),
            "llama3-8b": sizes(32, 4096, 32, 128256, ffn_hidden_size=14336, **_OF_3),
            "llama3-70b": sizes(80, 8192, 64, 128256, ffn_hidden_size=28672, **_OF_3),
            "llama3-405b": sizes(126, 16384, 128, 128256, ffn_hidden_size=53248, **_OF_3),
            # Small enough for a laptop: 8.9 M parameters with an 8 k vocabulary.
            "laptop-10m": sizes(6, 256, 8, 8192, num_query_groups=4, ffn_hidden_size=768, max_position_embeddings=1024),
        },
        defaults={
            **like.DEFAULTS,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        parts=(
            like.SIZES,
            like.GATE,
            like.DROPOUT,
            like.biases("attention_bias", "mlp_bias"),
            like.rope("linear", "llama3", "yarn"),
        ),
        tensors=like.DENSE,
    )
)
