"""A Hugging Face `config.json` for a model of ours, or the fields that no family of theirs has.

The problem in a sentence: a field that an export forgets gives a folder that loads, runs and says something else.

So an export is believed only after it has been read back: the keys are written by the family's table, read by
`hf_config`, which refuses what it does not know, and every field of the model must come out as it went in: those of
`TransformerConfig` whose kind is `MODEL` (`config/fields`). How it is computed, begun and trained is not published.

    config --keys_of--> config.json --config_from_huggingface--> config'        differing(config, config') == []
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimegatron.checkpoint.hf_config import ACTIVATIONS, COMMON, GATES, GPT2, config_from_huggingface
from minimegatron.checkpoint.hf_keys import DEFAULTS
from minimegatron.checkpoint.mixtures import MIXTURES
from minimegatron.checkpoint.origin import TOKENS
from minimegatron.config import TransformerConfig
from minimegatron.config.fields import MODEL
from minimegatron.errors import ConfigError

PUBLISHED = TransformerConfig.names_of(MODEL)
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def mathematics(config: TransformerConfig) -> dict[str, Any]:
    """The fields that decide what the model says: of kind MODEL, without those that nothing reads."""
    fields = {name: value for name, value in config.to_dict().items() if name in PUBLISHED}
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
    if family is not None and family not in DEFAULTS:
        raise ConfigError(f"there is no family {family!r}", fix=f"choose among {', '.join(DEFAULTS)}")
    with_experts = config.num_experts is not None
    tried: dict[str, list[str]] = {}
    unreadable: dict[str, list[str]] = {}  # what a family cannot even write down
    for name in DEFAULTS if family is None else (family,):
        if with_experts != (name in MIXTURES):
            if family is not None:
                tried[name] = [f"num_experts: {config.num_experts} here"]
            continue
        made = keys_of(config, name, tokens)
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


def keys_of(config: TransformerConfig, family: str, tokens: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The best that the family can say of the model; the caller reads it back.

    What a class of transformers has a default of its own for is said, so that no default of theirs looks as if it had
    been chosen here; `tokens` are the ids of `TOKENS`.
    """
    known = DEFAULTS[family]
    names = GPT2 if family == "gpt2" else COMMON
    keys = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    keys |= {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "torch_dtype": DTYPES[config.params_dtype],
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "initializer_range": config.init_method_std,
        **{name: (tokens or {}).get(name) for name in TOKENS},
    }
    if family == "gpt2":
        keys |= {
            "attn_pdrop": config.attention_dropout,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.hidden_dropout),
        }
        return {**keys, "activation_function": _name_of(ACTIVATIONS, config.activation)}
    keys |= {"attention_dropout": config.attention_dropout, "hidden_act": _name_of(GATES, config.activation)}
    keys |= {name: config.add_bias_linear for name in ("attention_bias", "mlp_bias") if name in known}
    if "use_sliding_window" in known:
        windowed, layers = config.sliding_window is not None, config.num_layers
        keys |= {"use_sliding_window": windowed, "sliding_window": config.sliding_window}
        if windowed and "layer_types" in known:
            keys |= {"layer_types": ["sliding_attention"] * layers, "max_window_layers": 0}
    elif "sliding_window" in known:
        keys["sliding_window"] = config.sliding_window
    return {**keys, **_rope(config), **_experts(config, family)}


def _name_of(names: Mapping[str, str], ours: str) -> str:
    return next((theirs for theirs, value in names.items() if value == ours), f"minimegatron's {ours}")


def _rope(config: TransformerConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope_theta": config.rotary_base}
    kind = config.rope_scaling_type
    if kind == "none":
        return keys
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.rope_scaling_factor}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = config.rope_scaling_original_max_position_embeddings
    if kind == "llama3":
        scaling["low_freq_factor"] = config.rope_scaling_low_freq_factor
        scaling["high_freq_factor"] = config.rope_scaling_high_freq_factor
    if kind == "yarn":
        scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
        scaling["truncate"] = config.yarn_correction_range_round_to_int
        if config.yarn_mscale or config.yarn_mscale_all_dim:
            scaling |= {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
    return {**keys, "rope_scaling": scaling}


def _experts(config: TransformerConfig, family: str) -> dict[str, Any]:
    """Keys of a family with experts; of a family without, none."""
    experts, shared = config.num_experts, config.moe_shared_expert_intermediate_size
    if experts is None:
        return {}
    keys: dict[str, Any] = {"num_experts_per_tok": config.moe_router_topk}
    dense = [i for i, has in enumerate(config.expert_layers) if not has]
    if family == "mixtral":
        jitter = config.moe_input_jitter_eps or 0.0
        sizes = {"num_local_experts": experts, "intermediate_size": config.moe_ffn_hidden_size}
        return {**keys, **sizes, "router_jitter_noise": jitter}
    keys["moe_intermediate_size"] = config.moe_ffn_hidden_size
    if family in ("qwen2_moe", "qwen3_moe"):
        keys |= {"num_experts": experts, "mlp_only_layers": dense, "norm_topk_prob": not config.moe_router_pre_softmax}
        if family == "qwen2_moe":
            keys |= {"shared_expert_intermediate_size": shared or 0, "qkv_bias": config.add_qkv_bias}
        return keys
    return {
        **keys,
        "n_routed_experts": experts,
        "n_shared_experts": (shared or 0) // config.moe_ffn_hidden_size,
        "first_k_dense_replace": len(dense),
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "head_dim": config.qk_pos_emb_head_dim,
        "rope_interleave": config.rotary_interleaved,
        # Of DeepSeek's own code, which others than transformers read; and there is no layer of a further prediction.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }
