"""GPT-2 and GPT-3: LayerNorm, learned positions, biases everywhere, a GELU; weights stored `[in, out]` (Conv1D).

GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); GPT-3:
Brown et al. 2020 (arXiv 2005.14165).
"""

from __future__ import annotations

from minimegatron.models.families.family import Family, Row, named, noted, one_of, only, register
from minimegatron.models.families.llama_like import sizes, untied

_L, _T = "decoder.layers.{}.", "transformer.h.{}."

register(
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        tensorrt_llm={"gpt_variant": "gpt2"},
        fields={
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            "position_embedding_type": "learned_absolute",
        },
        presets={
            "gpt2-124m": sizes(12, 768, 12, 50257),
            "gpt2-355m": sizes(24, 1024, 16, 50257),
            "gpt3-175b": sizes(96, 12288, 96, 50257, max_position_embeddings=2048),
        },
        defaults={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
            "reorder_and_upcast_attn": False,
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        parts=(
            named(
                {
                    "n_layer": "num_layers",
                    "n_head": "num_attention_heads",
                    "n_embd": "hidden_size",
                    "n_inner": "ffn_hidden_size",
                    "vocab_size": "vocab_size",
                    "n_positions": "max_position_embeddings",
                    "layer_norm_epsilon": "layernorm_epsilon",
                }
            ),
            one_of(
                "activation_function",
                {
                    "gelu_new": "gelu_tanh",
                    "gelu_pytorch_tanh": "gelu_tanh",
                    "gelu": "gelu",
                    "relu": "relu",
                    "silu": "silu",
                },
                "activation",
                "the MLP of GPT-2",
            ),
            only(scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, reorder_and_upcast_attn=False),
            noted(attn_pdrop="attention_dropout", resid_pdrop="hidden_dropout", embd_pdrop="hidden_dropout"),
        ),
        tensors=(
            Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
            Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
            *(
                Row(_L + f"{ours}.{kind}", (_T + f"{theirs}.{kind}",))
                for ours, theirs in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2"))
                for kind in ("weight", "bias")
            ),
            Row(_L + "self_attention.linear_qkv.weight", (_T + "attn.c_attn.weight",), "conv_pack"),
            Row(_L + "self_attention.linear_qkv.bias", (_T + "attn.c_attn.bias",), "conv_pack"),
            Row(_L + "self_attention.linear_proj.weight", (_T + "attn.c_proj.weight",), "transpose"),
            Row(_L + "self_attention.linear_proj.bias", (_T + "attn.c_proj.bias",)),
            Row(_L + "mlp.linear_fc1.weight", (_T + "mlp.c_fc.weight",), "transpose"),
            Row(_L + "mlp.linear_fc1.bias", (_T + "mlp.c_fc.bias",)),
            Row(_L + "mlp.linear_fc2.weight", (_T + "mlp.c_proj.weight",), "transpose"),
            Row(_L + "mlp.linear_fc2.bias", (_T + "mlp.c_proj.bias",)),
            Row("decoder.final_layernorm.weight", ("transformer.ln_f.weight",)),
            Row("decoder.final_layernorm.bias", ("transformer.ln_f.bias",)),
            Row("output_layer.weight", ("lm_head.weight",), when=untied),
        ),
        prefix="transformer.",
    )
)
