"""A Hugging Face `config.json` for a model of ours, or the fields that no family of theirs has.

The problem in a sentence: a field that an export forgets gives a folder that loads, runs and says something else.

So an export is believed only after it has been read back: the family (`models/families`) writes the keys, the family
reads them and refuses what it does not know, and every field of the model must come out as it went in. A new field of
`TransformerConfig` is part of that comparison from its first day; `CHOICES` are those known to be choices of a
training, not of a model.

    config --config_to_hf--> config.json --config_from_hf--> config'        differing(config, config') == []
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.origin import TOKENS
from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import FAMILIES, family_named

# How a model is computed, begun and trained; two models that differ in nothing else say the same.
CHOICES = frozenset(
    """
    make_vocab_size_divisible_by attention_backend transformer_impl kernels params_dtype fp32_residual_connection
    hidden_dropout attention_dropout init_method_std scale_output_init
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    fp8_format fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad tp_only_amax_red
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    moe_router_bias_update_rate moe_router_dtype moe_input_jitter_eps moe_router_load_balancing_type
    moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor moe_pad_expert_input_to_capacity
    moe_token_drop_policy moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap mtp_loss_scaling_factor
    """.split()
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def mathematics(config: TransformerConfig) -> dict[str, Any]:
    """The fields that decide what the model says: without choices, and without fields that nothing reads."""
    fields = {name: value for name, value in config.to_dict().items() if name not in CHOICES}
    unread = list(_LATENT)
    if config.multi_latent_attention:
        unread = ["num_query_groups", "rotary_percent", "kv_channels"]
    if config.rotates:
        kind = config.rope_scaling_type
        unread.append("max_position_embeddings")
        unread += [name for name in fields if name.startswith("yarn_") and kind != "yarn"]
        unread += ["rope_scaling_factor"] if kind == "none" else []
        unread += ["rope_scaling_original_max_position_embeddings"] if kind in ("none", "linear") else []
        unread += ["rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"] if kind != "llama3" else []
    else:
        unread += [name for name in fields if name.startswith(("rotary_", "rope_", "yarn_"))]
    if config.num_experts is None:
        unread += [name for name in fields if name.startswith("moe_")]
    else:
        fields["moe_layer_freq"] = config.expert_layers
        fields["sinkhorn"] = "sinkhorn" in str(config.moe_router_load_balancing_type)
        unread += ["ffn_hidden_size"] if all(config.expert_layers) else []
    return {name: value for name, value in fields.items() if name not in unread}


def differing(here: TransformerConfig, there: TransformerConfig) -> list[str]:
    """`field: value here, value there` for each field in which the two are different models."""
    one, other = mathematics(here), mathematics(there)
    return [
        f"{name}: {one.get(name)!r} here, {other.get(name)!r} there"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


def config_to_huggingface(
    config: TransformerConfig,
    family: str | None = None,
    like: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """(family, contents of `config.json`).

    Args:
        config: the model.
        family: its `model_type`; default the first that can say what it is.
        like: the `config.json` that the model once had: what it says beyond the mathematics is kept.
        tokens: ids that begin, end and fill a document, where there is no `like` to say it.

    Raises:
        ConfigError: naming the fields that the family, or every family, cannot say.
    """
    if like is not None:
        found, there = config_from_huggingface(like)
        differs = differing(config, there)
        if differs or family not in (None, found):
            raise ConfigError(
                f"the model is not the {found} that config.json describes:\n  " + "\n  ".join(differs or [str(family)]),
                fix="name the folder that the model came from, or --hf-model none for a config.json of its own",
            )
        keys = {**like, "torch_dtype": DTYPES[config.params_dtype], "dtype": DTYPES[config.params_dtype]}
        if config.max_position_embeddings != there.max_position_embeddings:  # it was trained on longer sequences
            keys["max_position_embeddings"] = config.max_position_embeddings
            if differs := differing(config, config_from_huggingface(keys)[1]):
                raise ConfigError(
                    "config.json with max_position_embeddings "
                    f"{config.max_position_embeddings} would be another model:\n  " + "\n  ".join(differs),
                    fix="--hf-model none for a config.json of its own",
                )
        return found, keys
    said = {"torch_dtype": DTYPES[config.params_dtype], **{name: (tokens or {}).get(name) for name in TOKENS}}
    tried: dict[str, list[str]] = {}
    unreadable: dict[str, list[str]] = {}  # what a family cannot even write down
    for name, there_is in FAMILIES.items() if family is None else ((family, family_named(family)),):
        if (config.num_experts is not None) != there_is.has_experts:
            if family is not None:
                tried[name] = [f"num_experts: {config.num_experts} here"]
            continue
        made = {**there_is.config_to_hf(config), **said}
        try:
            tried[name] = differing(config, config_from_huggingface(made)[1])
        except ConfigError as error:
            unreadable[name] = [error.what]
        if tried.get(name) == []:
            return name, made
    tried = tried or unreadable
    name = min(tried, key=lambda name: len(tried[name]))
    raise ConfigError(
        f"{'no published family is this model; the nearest, ' if family is None else ''}{name}, cannot say\n  "
        + "\n  ".join(tried[name]),
        fix="train with these fields as the family has them, or keep the model as it is: --to ours, --to torch_dist",
    )
