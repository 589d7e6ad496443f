"""LLaVA 1.5: Llama with CLIP's view of a picture in place of words.

| part               | in the file                           | here                                             |
|--------------------|---------------------------------------|--------------------------------------------------|
| language model     | `text_config`                         | as `llama`                                       |
| vision transformer | `vision_config` (CLIP)                | `vision_...` (`config/vision`)                   |
| layer that is read | `vision_feature_layer`, -2: after the | `vision_num_layers`: so many are computed, those |
|                    | last but one                          | behind them neither kept nor written             |
| picture token      | `image_token_index`                   | `image_token_id`                                 |

A file that is written here has the layers that are computed, and `vision_feature_layer` -1; its encoder's last norm,
which nobody reads, is left out. The class token stays in the encoder (`vision_feature_select_strategy` default).

Liu et al. 2023 (arXiv 2304.08485, 2310.03744); Radford et al. 2021 (arXiv 2103.00020). Megatron-LM:
`megatron/core/models/multimodal/llava_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.config.vision import CHANNELS
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, named, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama import LLAMA
from minimegatron.models.families.llama_like import sizes

_VISION = {
    "hidden_size": "vision_hidden_size",
    "num_attention_heads": "vision_num_attention_heads",
    "intermediate_size": "vision_ffn_hidden_size",
    "patch_size": "vision_patch_size",
    "image_size": "vision_image_size",
}
_CLIP: dict[str, Any] = {  # defaults of its class
    "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "patch_size": 32, "image_size": 224,
    "num_hidden_layers": 12, "num_channels": CHANNELS, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "vocab_size": None,
}  # fmt: skip
_LARGE: dict[str, Any] = {  # of a file without `vision_config`
    "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "patch_size": 14, "image_size": 336,
    "num_hidden_layers": 24,
}  # fmt: skip


def _flat(hf: Mapping[str, Any]) -> dict[str, Any]:
    tied = hf.get("tie_word_embeddings") or (hf.get("text_config") or {}).get("tie_word_embeddings")
    return {**hf, "tie_word_embeddings": bool(tied)}


def _read_text(keys: Keys) -> Fields:
    own = Keys(keys["text_config"] or {}, f"{keys.family} text_config", LLAMA.defaults)
    own.only("model_type", LLAMA.name)
    own.get("tie_word_embeddings")  # `_flat`
    fields: Fields = {}
    for part in LLAMA.parts:
        fields |= part.read(own)
    own.finish()
    keys.only("vocab_size", fields["vocab_size"], "is not that of text_config")  # transformers does not read it
    return fields


def _write_text(config: TransformerConfig) -> Fields:
    own: Fields = {"model_type": LLAMA.name}
    for part in LLAMA.parts:
        own |= part.write(config)
    return {"text_config": own}


def _read_vision(keys: Keys) -> Fields:
    given = keys["vision_config"]
    own = Keys(_LARGE if given is None else given, f"{keys.family} vision_config", _CLIP)
    own.only("model_type", "clip_vision_model")
    own.only("num_channels", CHANNELS)
    own.only("hidden_act", "quick_gelu")
    own.only("layer_norm_eps", 1e-5)
    own.get("vocab_size")  # of CLIP's other half
    fields = {ours: own[theirs] for theirs, ours in _VISION.items()}
    layers, read = own["num_hidden_layers"], keys["vision_feature_layer"]
    own.finish()
    if listed := [name for name, value in fields.items() if isinstance(value, list)]:
        raise ConfigError(f"{', '.join(listed)} with a number for each side is not supported", fix="square patches")
    computed = read if isinstance(read, list) or read >= 0 else layers + 1 + read
    if isinstance(read, list) or not 1 <= computed <= layers:
        raise ConfigError(
            f"vision_feature_layer={read} of an encoder with {layers} layers is not supported",
            fix=f"the output of one layer: 1 to {layers}, or -1 to {-layers}",
        )
    return {**fields, "vision_num_layers": computed}


def _write_vision(config: TransformerConfig) -> Fields:
    own = {theirs: getattr(config, ours) for theirs, ours in _VISION.items()}
    more = {"model_type": "clip_vision_model", "num_hidden_layers": config.vision_num_layers}
    return {"vision_config": {**more, **own}, "vision_feature_layer": -1}


_TEXT, _TOWER = "language_model.", "vision_tower.vision_model."
_L, _V = "vision_model.decoder.layers.{}.", _TOWER + "encoder.layers.{}."
_KINDS = ("weight", "bias")
_VISION_ROWS = tuple(
    Row(ours, theirs, how, on="vision")
    for ours, theirs, how in (
        ("vision_model.conv1.weight", (_TOWER + "embeddings.patch_embedding.weight",), "stack"),
        ("vision_model.position_embeddings.class_token", (_TOWER + "embeddings.class_embedding",), "stack"),
        ("vision_model.position_embeddings.weight", (_TOWER + "embeddings.position_embedding.weight",), "stack"),
        *((f"vision_model.ln_pre.{x}", (_TOWER + f"pre_layrnorm.{x}",), "stack") for x in _KINDS),
        *((_L + f"input_layernorm.{x}", (_V + f"layer_norm1.{x}",), "stack") for x in _KINDS),
        *(
            (_L + f"self_attention.linear_qkv.{x}", tuple(_V + f"self_attn.{part}_proj.{x}" for part in "qkv"), "pack")
            for x in _KINDS
        ),
        *((_L + f"self_attention.linear_proj.{x}", (_V + f"self_attn.out_proj.{x}",), "stack") for x in _KINDS),
        *((_L + f"pre_mlp_layernorm.{x}", (_V + f"layer_norm2.{x}",), "stack") for x in _KINDS),
        *((_L + f"mlp.linear_fc{i}.{x}", (_V + f"mlp.fc{i}.{x}",), "stack") for i in (1, 2) for x in _KINDS),
        *(
            (f"vision_projection.linear_fc{i}.{x}", (f"multi_modal_projector.linear_{i}.{x}",), "stack")
            for i in (1, 2)
            for x in _KINDS
        ),
    )
)


def _left_out(config: TransformerConfig) -> tuple[str, ...]:
    behind = range(config.vision_num_layers or 0, 100)
    return (
        _TOWER + "post_layernorm.",
        _TOWER + "embeddings.position_ids",
        *(_V.replace("{}", str(number)) for number in behind),
    )


# Three versions of transformers: one replacement after the other, so that a published name becomes itself.
_NAMES = {
    "model.language_model.": _TEXT + "model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.vision_tower.": "vision_tower.",
    _TOWER: "vision_tower.",
    "vision_tower.": _TOWER,
    _TEXT + "lm_head.": "lm_head.",
    "lm_head.": _TEXT + "lm_head.",
}


def _kept(keys: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    own = _LARGE if keys.get("vision_config") is None else keys["vision_config"]
    return {
        **keys,
        "text_config": {**(keys.get("text_config") or {}), "max_position_embeddings": config.max_position_embeddings},
        "vision_config": {**own, "num_hidden_layers": config.vision_num_layers},
        "vision_feature_layer": -1,
    }


_OF_15: dict[str, Any] = {
    "vocab_size": 32064, "max_position_embeddings": 4096, "image_token_id": 32000, "vision_num_layers": 23,
    "vision_hidden_size": 1024, "vision_num_attention_heads": 16, "vision_ffn_hidden_size": 4096,
    "vision_patch_size": 14, "vision_image_size": 336, "vision_patches_per_sample": 577,
}  # fmt: skip

register(
    Family(
        name="llava",
        architecture="LlavaForConditionalGeneration",
        fields={
            **like.FIELDS,
            "vision_model_type": "clip",
            "vision_spatial_merge_size": 1,
            "vision_temporal_patch_size": 1,
        },
        presets={
            # Small enough for a laptop: 0.3 M parameters, for pictures of 32 x 32 pixels.
            "laptop-llava": sizes(
                2, 96, 4, 512, num_query_groups=2, ffn_hidden_size=256, max_position_embeddings=256,
                vision_num_layers=2, vision_hidden_size=64, vision_num_attention_heads=4, vision_ffn_hidden_size=128,
                vision_patch_size=8, vision_image_size=32, vision_patches_per_sample=17, image_token_id=3,
                init_method_std=0.1, untie_embeddings_and_output_weights=False,
            ),
            "llava-1.5-7b": {**sizes(32, 4096, 32, 32064, ffn_hidden_size=11008), **_OF_15},
            "llava-1.5-13b": {**sizes(40, 5120, 40, 32064, ffn_hidden_size=13824), **_OF_15},
        },
        defaults={
            "text_config": None,
            "vision_config": None,
            "image_token_index": 32000,
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -2,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": False,
        },
        parts=(
            Part(_read_text, _write_text),
            Part(_read_vision, _write_vision),
            named({"image_token_index": "image_token_id"}),
            only(projector_hidden_act="gelu", vision_feature_select_strategy="default", multimodal_projector_bias=True),
        ),
        tensors=(
            *(row._replace(theirs=tuple(_TEXT + name for name in row.theirs)) for row in like.DENSE),
            *_VISION_ROWS,
        ),
        aliases={"image_token_id": "image_token_index"},
        flat=_flat,
        left_out=_left_out,
        kept=_kept,
        tied={_TEXT + "lm_head.weight": _TEXT + "model.embed_tokens.weight"},
        renamed=_NAMES,
        older=_NAMES,
    )
)  # fmt: skip
