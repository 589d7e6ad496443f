"""T5, T5 1.1 and FLAN-T5: an encoder and a decoder, biases of relative positions in place of positions, no other bias.

| of its own                                            | where                                                     |
|-------------------------------------------------------|-----------------------------------------------------------|
| the first layer of a stack has the table of all       | `encoder_bias`, `decoder_bias` (`layers/attention/relative`) |
| scores are not divided by sqrt(d)                     | `softmax_scale` 1                                         |
| T5: ReLU, a tied head that sees h / sqrt(h)           | `activation`, `models/encoder_decoder`                    |
| 1.1: a gated GELU, a head of its own, not scaled      | the same                                                  |

Whether a file's head is one of its own: before transformers 5 `tie_word_embeddings` says so. From 5 on that is always
true in a file, and `scale_decoder_outputs` is false where it used to be false.

Copies of the embedding (`encoder.embed_tokens`, `decoder.embed_tokens`), which old files have, are compared with it.
transformers keeps `wo` in fp32 in a model of 16 bits; here it has `params_dtype`.

Raffel et al., arXiv:1910.10683; Shazeer, arXiv:2002.05202; Chung et al., arXiv:2210.11416.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families.family import Family, Fields, Part, Row, named, noted, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import sizes, untied

_PROJECTIONS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gelu": "gelu", "silu": "silu",
                "gelu_new": "gelu_tanh"}  # fmt: skip
_THEIR_NAMES = {"gated-gelu": "gelu_new"}  # of the function itself, where it is not the last word


def _read_layers(keys: Keys) -> Fields:
    encoder, decoder = int(keys["num_layers"]), keys["num_decoder_layers"]
    return {"encoder_num_layers": encoder, "num_layers": encoder + (encoder if decoder is None else int(decoder))}


def _write_layers(config: TransformerConfig) -> Fields:
    encoder = config.encoder_num_layers or 0
    return {"num_layers": encoder, "num_decoder_layers": config.num_layers - encoder}


def _read_activation(keys: Keys) -> Fields:
    name = keys["feed_forward_proj"]
    if name not in _PROJECTIONS:
        raise ConfigError(
            f"feed_forward_proj {name!r} is not supported in the MLP of T5", fix=f"one of {', '.join(_PROJECTIONS)}"
        )
    gated = name.startswith("gated-")
    keys.only("is_gated_act", gated, f"is not that of feed_forward_proj {name!r}")
    function = _THEIR_NAMES.get(name, name.removeprefix("gated-"))
    keys.only("dense_act_fn", function, f"is not that of feed_forward_proj {name!r}")
    return {"activation": _PROJECTIONS[name]}


def _write_activation(config: TransformerConfig) -> Fields:
    ours = config.activation
    return {
        "feed_forward_proj": next((name for name, of in _PROJECTIONS.items() if of == ours), f"minimegatron's {ours}")
    }


def _read_head(keys: Keys) -> Fields:
    tied, scales = bool(keys["tie_word_embeddings"]), keys["scale_decoder_outputs"]
    if scales and not tied:
        raise ConfigError("scale_decoder_outputs=True with tie_word_embeddings=False", fix="one of the two")
    return {"untie_embeddings_and_output_weights": not tied or scales is False}


def _write_head(config: TransformerConfig) -> Fields:
    return {"is_encoder_decoder": True}  # whether the head is tied is written for every family


def _stack(ours: str, theirs: str, mlp: int) -> tuple[Row, ...]:
    """Rows of one stack; its MLP is `layer.{mlp}` of a block of theirs."""
    o, t = ours + ".layers.{}.", theirs + ".block.{}.layer."
    dense = f"{t}{mlp}.DenseReluDense."
    return (
        Row(o + "input_layernorm.weight", (t + "0.layer_norm.weight",)),
        Row(o + "self_attention.linear_qkv.weight", tuple(t + f"0.SelfAttention.{x}.weight" for x in "qkv"), "pack"),
        Row(o + "self_attention.linear_proj.weight", (t + "0.SelfAttention.o.weight",)),
        Row(o + "pre_mlp_layernorm.weight", (f"{t}{mlp}.layer_norm.weight",)),
        Row(o + "mlp.linear_fc1.weight", (dense + "wi_0.weight", dense + "wi_1.weight"),
            when=lambda config: config.gated_linear_unit),
        Row(o + "mlp.linear_fc1.weight", (dense + "wi.weight",), when=lambda config: not config.gated_linear_unit),
        Row(o + "mlp.linear_fc2.weight", (dense + "wo.weight",)),
        Row(f"{ours}_bias.weight", (f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)),
    )  # fmt: skip


_O, _T = "decoder.layers.{}.", "decoder.block.{}.layer.1."
_CROSS = {"linear_q": "q", "linear_kv": "kv", "linear_proj": "o"}
_SMALL: dict[str, Any] = {"kv_channels": 64, "max_position_embeddings": 512, "encoder_num_layers": 6}
_V11: dict[str, Any] = {"activation": "geglu_tanh", "untie_embeddings_and_output_weights": True}

register(
    Family(
        name="t5",
        architecture="T5ForConditionalGeneration",
        fields={
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "activation": "relu",
            "position_embedding_type": "relative",
            "add_bias_linear": False,
            "softmax_scale": 1.0,
            "encoder_num_layers": 1,
        },
        presets={
            "t5-small": sizes(12, 512, 8, 32128, **_SMALL, ffn_hidden_size=2048),
            "t5-base": sizes(24, 768, 12, 32128, **{**_SMALL, "encoder_num_layers": 12}, ffn_hidden_size=3072),
            "flan-t5-small": sizes(
                16, 512, 6, 32128, **{**_SMALL, "encoder_num_layers": 8}, ffn_hidden_size=1024, **_V11
            ),
            "flan-t5-base": sizes(
                24, 768, 12, 32128, **{**_SMALL, "encoder_num_layers": 12}, ffn_hidden_size=2048, **_V11
            ),
        },
        defaults={
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_decoder_layers": None,
            "num_heads": 8,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "layer_norm_epsilon": 1e-6,
            "feed_forward_proj": "relu",
            "decoder_start_token_id": 0,
            "tie_word_embeddings": True,
            "scale_decoder_outputs": None,
        },
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        parts=(
            named(
                {
                    "vocab_size": "vocab_size",
                    "d_model": "hidden_size",
                    "d_kv": "kv_channels",
                    "d_ff": "ffn_hidden_size",
                    "num_heads": "num_attention_heads",
                    "relative_attention_num_buckets": "relative_attention_num_buckets",
                    "relative_attention_max_distance": "relative_attention_max_distance",
                    "layer_norm_epsilon": "layernorm_epsilon",
                    "decoder_start_token_id": "decoder_start_token_id",
                }
            ),
            Part(_read_layers, _write_layers),
            Part(_read_activation, _write_activation),
            only(is_encoder_decoder=True),
            Part(_read_head, _write_head),
            noted(dropout_rate="hidden_dropout"),
        ),
        tensors=(
            Row("embedding.word_embeddings.weight", ("shared.weight",)),
            *_stack("encoder", "encoder", 1),
            Row("encoder.layers.{}.final_layernorm.weight", ("encoder.final_layer_norm.weight",), on="final_layernorm"),
            *_stack("decoder", "decoder", 2),
            Row(_O + "pre_cross_attn_layernorm.weight", (_T + "layer_norm.weight",), on="cross_attention"),
            *(
                Row(_O + f"cross_attention.{ours}.weight", tuple(_T + f"EncDecAttention.{x}.weight" for x in theirs),
                    on="cross_attention")
                for ours, theirs in _CROSS.items()
            ),
            Row("decoder.final_layernorm.weight", ("decoder.final_layer_norm.weight",)),
            Row("output_layer.weight", ("lm_head.weight",), when=untied),
        ),
        tied=dict.fromkeys(
            ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
        ),
        left_out=lambda config: ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",),
    )
)  # fmt: skip
