"""OLMo 2: Llama with norms after attention and MLP instead of before them, and a norm over all queries and all keys.

OLMo team, arXiv:2501.00656.
"""

from __future__ import annotations

from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Row, register
from minimegatron.models.families.llama_like import L, T, sizes

register(
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        fields={
            **like.FIELDS,
            "layernorm_placement": "output",
            "layernorm_epsilon": 1e-6,
            "qk_layernorm": True,
            "qk_layernorm_over_heads": True,
            "rotary_base": 500_000.0,
            "max_position_embeddings": 4096,
        },
        presets={
            "olmo2-1b": sizes(16, 2048, 16, 100352, ffn_hidden_size=8192),
            "olmo2-7b": sizes(32, 4096, 32, 100352, ffn_hidden_size=11008),
            "olmo2-13b": sizes(40, 5120, 40, 100352, ffn_hidden_size=13824),
            "olmo2-32b": sizes(64, 5120, 40, 100352, num_query_groups=8, ffn_hidden_size=27648),
        },
        defaults={
            **like.DEFAULTS,
            "vocab_size": 50304,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        parts=(
            like.SIZES,
            like.GATE,
            like.DROPOUT,
            like.biases("attention_bias"),
            like.rope("linear", "llama3", "yarn"),
        ),
        tensors=(
            *like.WORDS,
            Row(L + "post_self_attn_layernorm.weight", (T + "post_attention_layernorm.weight",)),
            Row(L + "post_mlp_layernorm.weight", (T + "post_feedforward_layernorm.weight",)),
            *like.HEAD,
            *like.ATTENTION,
            *like.MLP,
        ),
    )
)
