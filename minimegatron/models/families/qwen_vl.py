"""Qwen2.5-VL: Qwen2.5 with pictures in place of words.

| part               | in the file                                              | here                            |
|--------------------|----------------------------------------------------------|---------------------------------|
| language model     | keys at the top, or in `text_config` (transformers 5)    | as `qwen2`, with mRoPE          |
| vision transformer | `vision_config`                                          | `vision_...` (`config/vision`)  |
| picture token      | `image_token_id`                                         | the same                        |

Videos are not read: their token is a word as others are. `out_hidden_size` must be the language model's width, as it
is in every file.

Bai et al. 2025 (arXiv 2502.13923).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.config.vision import CHANNELS
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, named, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import sizes
from minimegatron.models.families.qwen import WINDOWS

_VISION = {
    "depth": "vision_num_layers",
    "hidden_size": "vision_hidden_size",
    "num_heads": "vision_num_attention_heads",
    "intermediate_size": "vision_ffn_hidden_size",
    "patch_size": "vision_patch_size",
    "temporal_patch_size": "vision_temporal_patch_size",
    "spatial_merge_size": "vision_spatial_merge_size",
    "window_size": "vision_window_size",
}
_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32, "hidden_size": 3584, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31),
    "out_hidden_size": 3584, "hidden_act": "silu", "in_channels": CHANNELS, "rope_parameters": None,
}  # fmt: skip
_AXIAL = {"rope_type": "axial", "rope_theta": 10000.0}


def _flat(hf: Mapping[str, Any]) -> dict[str, Any]:
    text = dict(hf.get("text_config") or {})
    tied = bool(hf.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return {**text, **{key: value for key, value in hf.items() if key != "text_config"}, "tie_word_embeddings": tied}


def _read_vision(keys: Keys) -> Fields:
    own = Keys(keys["vision_config"] or {}, f"{keys.family} vision_config", _VISION_DEFAULTS)
    own.only("hidden_act", "silu")
    own.only("in_channels", CHANNELS)
    own.only("out_hidden_size", keys["hidden_size"], "is not the width of the language model")
    own.only("in_chans", CHANNELS)  # of published files; transformers does not read these two
    own.only("spatial_patch_size", own["patch_size"], "is not patch_size")
    rope = own["rope_parameters"]
    if rope is not None and {**_AXIAL, **rope} != _AXIAL:
        raise ConfigError(
            f"rope_parameters={rope} of the vision encoder are not supported", fix=f"use a model with {_AXIAL}"
        )
    fields = {ours: own[theirs] for theirs, ours in _VISION.items()}
    fields["vision_fullatt_block_indexes"] = tuple(own["fullatt_block_indexes"])
    own.finish()
    if listed := [name for name, value in fields.items() if isinstance(value, list)]:
        raise ConfigError(f"{', '.join(listed)} with a number for each side is not supported", fix="square patches")
    return fields


def _write_vision(config: TransformerConfig) -> Fields:
    own = {theirs: getattr(config, ours) for theirs, ours in _VISION.items()}
    blocks = {"fullatt_block_indexes": list(config.vision_fullatt_block_indexes)}
    return {"vision_config": {"hidden_act": "silu", "out_hidden_size": config.hidden_size, **own, **blocks}}


def _read_rope(keys: Keys) -> Fields:
    scaling = Keys(dict(keys.get("rope_scaling") or keys.get("rope_parameters") or {}), "rope")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "mrope") or scaling.get("type", kind) not in ("default", "mrope"):
        raise ConfigError(f"rope_type {kind!r} is not supported in {keys.family}", fix="supported: default, mrope")
    if keys["head_dim"] not in (None, keys["hidden_size"] // keys["num_attention_heads"]):
        raise ConfigError(
            f"head_dim={keys['head_dim']} is not supported: transformers' class has heads of hidden_size / "
            f"num_attention_heads = {keys['hidden_size'] // keys['num_attention_heads']} channels",
            fix="leave head_dim out",
        )
    fields = {
        "rotary_base": float(scaling.get("rope_theta", keys["rope_theta"])),
        "mrope_section": tuple(scaling.get("mrope_section", (16, 24, 24))),
    }
    scaling.finish()
    return fields


def _write_rope(config: TransformerConfig) -> Fields:
    section = list(config.mrope_section or ())
    return {"rope_theta": config.rotary_base, "rope_scaling": {"type": "mrope", "mrope_section": section}}


_L, _V = "vision_model.decoder.layers.{}.", "visual.blocks.{}."
_VISION_ROWS = tuple(
    Row(ours, theirs, how, on="vision")
    for ours, theirs, how in (
        ("vision_model.conv1.weight", ("visual.patch_embed.proj.weight",), "stack"),
        (_L + "input_layernorm.weight", (_V + "norm1.weight",), "stack"),
        *((_L + f"self_attention.linear_qkv.{x}", (_V + f"attn.qkv.{x}",), "pack_rows") for x in ("weight", "bias")),
        *((_L + f"self_attention.linear_proj.{x}", (_V + f"attn.proj.{x}",), "stack") for x in ("weight", "bias")),
        (_L + "pre_mlp_layernorm.weight", (_V + "norm2.weight",), "stack"),
        *(
            (_L + f"mlp.linear_fc1.{x}", (_V + f"mlp.gate_proj.{x}", _V + f"mlp.up_proj.{x}"), "stack")
            for x in ("weight", "bias")
        ),
        *((_L + f"mlp.linear_fc2.{x}", (_V + f"mlp.down_proj.{x}",), "stack") for x in ("weight", "bias")),
        ("vision_projection.norm.weight", ("visual.merger.ln_q.weight",), "stack"),
        *((f"vision_projection.linear_fc1.{x}", (f"visual.merger.mlp.0.{x}",), "stack") for x in ("weight", "bias")),
        *((f"vision_projection.linear_fc2.{x}", (f"visual.merger.mlp.2.{x}",), "stack") for x in ("weight", "bias")),
    )
)
_SEES = {
    "vision_num_layers": 32, "vision_hidden_size": 1280, "vision_num_attention_heads": 16,
    "vision_ffn_hidden_size": 3420, "vision_fullatt_block_indexes": (7, 15, 23, 31), "image_token_id": 151655,
    "mrope_section": (16, 24, 24), "max_position_embeddings": 128000,
}  # fmt: skip

register(
    Family(
        name="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        fields={
            **like.FIELDS,
            "position_embedding_type": "mrope",
            "rotary_base": 1_000_000.0,
            "layernorm_epsilon": 1e-6,
            "add_qkv_bias": True,
        },
        presets={
            # Small enough for a laptop: 0.4 M parameters, for pictures of some 30 x 30 pixels. RoPE's base is small, so
            # that even the slowest pairs, which have the column, tell one token of a picture from the next; weights
            # begin at about h^-1/2, or so narrow a model needs hundreds of steps to look at anything.
            "laptop-vlm": sizes(
                2, 96, 4, 512, num_query_groups=2, ffn_hidden_size=256, mrope_section=(2, 4, 6), rotary_base=30.0,
                max_position_embeddings=256, vision_num_layers=2, vision_hidden_size=64, vision_num_attention_heads=4,
                vision_ffn_hidden_size=128, vision_patch_size=4, vision_temporal_patch_size=1, vision_window_size=16,
                vision_fullatt_block_indexes=(1,), image_token_id=3, untie_embeddings_and_output_weights=False,
                init_method_std=0.1,
            ),
            "qwen2.5-vl-3b": sizes(
                36, 2048, 16, 151936, num_query_groups=2, ffn_hidden_size=11008,
                untie_embeddings_and_output_weights=False, **_SEES,
            ),
            "qwen2.5-vl-7b": sizes(28, 3584, 28, 152064, num_query_groups=4, ffn_hidden_size=18944, **_SEES),
        },
        defaults={
            **like.DEFAULTS,
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 80,
            "layer_types": None,
            "vision_config": None,
            "image_token_id": 151655,
        },
        flat=_flat,
        parts=(
            like.SIZES,
            like.GATE,
            like.DROPOUT,
            Part(_read_rope, _write_rope),
            WINDOWS,
            Part(_read_vision, _write_vision),
            named({"image_token_id": "image_token_id"}),
        ),
        tensors=(*like.DENSE, *_VISION_ROWS),
        renamed={"model.language_model.": "model.", "model.visual.": "visual."},
        tokenizer="Qwen2Tokenizer",
    )
)  # fmt: skip
