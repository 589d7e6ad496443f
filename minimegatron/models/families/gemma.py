"""Gemma 2: norms before and after attention and MLP, capped scores and logits, every other layer with a window.

| of its own                                        | field                                              |
|---------------------------------------------------|----------------------------------------------------|
| gamma is stored minus one                         | `layernorm_zero_centered_gamma`                    |
| the embedding times sqrt(h)                       | `scale_embeddings`                                 |
| scores are c tanh(x / c), logits too              | `attn_logit_softcapping`, `final_logit_softcapping`|
| scores times query_pre_attn_scalar^-0.5           | `softmax_scale`                                    |
| layers 0, 2, 4, ... see a window, the others all  | `sliding_window`, `window_attn_skip_freq`          |

Gemma team, arXiv:2408.00118.
"""

from __future__ import annotations

from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, named, one_of, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, T, sizes


def _read_scale(keys: Keys) -> Fields:
    keys.only("use_bidirectional_attention", None)
    scalar = keys["query_pre_attn_scalar"]
    return {"softmax_scale": None if scalar == keys["head_dim"] else float(scalar) ** -0.5}


_SCALE = Part(_read_scale, lambda config: {"query_pre_attn_scalar": round(config.score_scale**-2)})

register(
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        fields={
            **like.FIELDS,
            "activation": "geglu_tanh",
            "layernorm_epsilon": 1e-6,
            "layernorm_placement": "both",
            "layernorm_zero_centered_gamma": True,
            "untie_embeddings_and_output_weights": False,
            "scale_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "window_attn_skip_freq": "2",
            "max_position_embeddings": 8192,
        },
        presets={
            "gemma2-2b": sizes(26, 2304, 8, 256000, num_query_groups=4, kv_channels=256, ffn_hidden_size=9216),
            "gemma2-9b": sizes(42, 3584, 16, 256000, num_query_groups=8, kv_channels=256, ffn_hidden_size=14336),
            "gemma2-27b": sizes(
                46, 4608, 32, 256000, num_query_groups=16, kv_channels=128, ffn_hidden_size=36864,
                softmax_scale=144**-0.5,
            ),
        },
        defaults={
            **{key: value for key, value in like.DEFAULTS.items() if key != "hidden_act"},
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "use_bidirectional_attention": None,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        parts=(
            like.SIZES,
            one_of(
                "hidden_activation",
                {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"},
                "activation",
                "a gated MLP",
            ),
            like.DROPOUT,
            like.biases("attention_bias"),
            like.rope("linear", "llama3", "yarn"),
            named({name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}),
            _SCALE,
            like.layer_types(2),
        ),
        tensors=(
            *like.WORDS,
            Row(L + "input_layernorm.weight", (T + "input_layernorm.weight",)),
            Row(L + "post_self_attn_layernorm.weight", (T + "post_attention_layernorm.weight",)),
            Row(L + "pre_mlp_layernorm.weight", (T + "pre_feedforward_layernorm.weight",)),
            Row(L + "post_mlp_layernorm.weight", (T + "post_feedforward_layernorm.weight",)),
            *like.HEAD,
            *like.ATTENTION,
            *like.MLP,
        ),
    )
)  # fmt: skip
