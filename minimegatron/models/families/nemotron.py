"""Nemotron-H, Nemotron Nano 2 and 3: Mamba-2 layers, a few of attention without positions, MLPs or experts.

Each layer is one part with a norm before it, in the order of `hybrid_override_pattern`, which transformers 5 calls
`layers_block_type`. MLPs and experts are not gated: squared ReLU. The router is DeepSeek-V3's, and one shared expert is
always there.

transformers does not let a time step of a whole sequence be below `time_step_min`, and does so here (NVIDIA's programs
for training do not, and neither does the recurrent step of transformers): `mamba_dt_limit_min`.

NVIDIA, arXiv:2504.03624; Nemotron Nano 2: arXiv:2508.14444. Megatron-LM: `megatron/core/models/mamba/mamba_model.py`.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import mamba
from minimegatron.models.families.family import Family, Fields, Part, Row, named, noted, one_of, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, sizes
from minimegatron.models.families.mamba import T

_SYMBOLS = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
_WITHOUT_EFFECT = (
    *mamba.WITHOUT_EFFECT, "expand", "time_step_limit", "num_logits_to_keep", "use_mamba_kernels", "n_shared_experts",
    "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
)  # fmt: skip


def _read_others(keys: Keys) -> Fields:
    """Keys of files that transformers passes over, and tied embeddings, which its class never ties."""
    epsilon, width = keys["layer_norm_epsilon"], keys["head_dim"]
    said = {"rms_norm_eps": epsilon, "norm_eps": epsilon, "attention_head_dim": width, "rope_theta": 10000,
            "partial_rotary_factor": 1.0, "tie_word_embeddings": False, "sliding_window": None}  # fmt: skip
    for key, wanted in said.items():
        keys.only(key, wanted)
    return {}


def _read_pattern(keys: Keys) -> Fields:
    kinds, pattern = keys["layers_block_type"], keys["hybrid_override_pattern"]
    if kinds is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"] if pattern is None else pattern
    else:
        if unknown := [kind for kind in kinds if kind not in _SYMBOLS]:
            raise ConfigError(f"layers_block_type {unknown[0]!r} is not supported", fix=f"of {', '.join(_SYMBOLS)}")
        kinds = [_SYMBOLS[kind] for kind in kinds]
    pattern = "".join(_SYMBOLS.get(kind, kind) for kind in kinds)
    keys.only("num_hidden_layers", len(pattern), f"with layers {pattern!r} is not supported")
    return {"num_layers": len(pattern), "hybrid_override_pattern": pattern}


def _write_pattern(config: TransformerConfig) -> Fields:
    return {"num_hidden_layers": config.num_layers, "hybrid_override_pattern": config.hybrid_override_pattern}


def _read_experts(keys: Keys) -> Fields:
    names = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor")
    experts, k, groups, kept, factor = (keys[name] for name in names)
    inner, shared = keys["moe_intermediate_size"], keys["moe_shared_expert_intermediate_size"]
    keys["norm_topk_prob"]
    keys.only("moe_latent_size", None)
    if "E" not in str(_read_pattern(keys)["hybrid_override_pattern"]):
        return {}
    keys.only("norm_topk_prob", k > 1, f"with num_experts_per_tok={k} is not supported")  # a lone weight stays as it is
    if groups > 1 and k != 2 * kept:
        raise ConfigError(
            f"num_experts_per_tok ({k}) with topk_group ({kept}) is not supported: a group is worth its two best "
            "experts there, its num_experts_per_tok / topk_group best here",
            fix="use a model with num_experts_per_tok = 2 topk_group",
        )
    return {
        "num_experts": int(experts),
        "moe_ffn_hidden_size": int(inner),
        "moe_shared_expert_intermediate_size": int(shared),
        "moe_router_topk": int(k),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": kept if groups > 1 else None,
        "moe_router_topk_scaling_factor": None if factor == 1 else float(factor),
        **_ROUTER,
    }


def _write_experts(config: TransformerConfig) -> Fields:
    if config.num_experts is None:
        return {}
    return {
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or 0,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "norm_topk_prob": config.moe_router_topk > 1,
    }


_ROUTER: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_SIZES = {
    **mamba.SIZES,
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "ssm_state_size": "mamba_state_dim",
    "time_step_min": "mamba_dt_limit_min",
}


def _mlp(ours: str, theirs: str, on: str) -> tuple[Row, ...]:
    pairs = (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
    return tuple(Row(L + f"{ours}.{fc}.weight", (T + f"{theirs}.{proj}.weight",), on=on) for fc, proj in pairs)


_LAYERS = (
    Row(L + "input_layernorm.weight", (T + "norm.weight",), on="self_attention"),
    Row(
        L + "self_attention.linear_qkv.weight",
        tuple(T + f"mixer.{x}_proj.weight" for x in "qkv"),
        "pack",
        on="self_attention",
    ),
    Row(L + "self_attention.linear_proj.weight", (T + "mixer.o_proj.weight",), on="self_attention"),
    Row(L + "pre_mlp_layernorm.weight", (T + "norm.weight",), on="mlp"),
    *_mlp("mlp", "mixer", "mlp"),
    Row(L + "pre_mlp_layernorm.weight", (T + "norm.weight",), on="moe"),
    Row(L + "mlp.router.weight", (T + "mixer.gate.weight",), on="moe"),
    Row(L + "mlp.router.expert_bias", (T + "mixer.gate.e_score_correction_bias",), on="moe"),
    Row(L + "mlp.experts.weight1", (T + "mixer.experts.{e}.up_proj.weight",), on="moe"),
    Row(L + "mlp.experts.weight2", (T + "mixer.experts.{e}.down_proj.weight",), on="moe"),
    *_mlp("mlp.shared_experts", "mixer.shared_experts", "moe"),
)


def _size(pattern: str, h: int, vocab: int = 131072, **more: Any) -> dict[str, Any]:
    return sizes(len(pattern), h, 32, vocab, hybrid_override_pattern=pattern, kv_channels=128, **more)


register(
    Family(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        fields={**mamba.FIELDS, "activation": "squared_relu", "mamba_dt_limit_min": 0.001},
        presets={
            "nemotron-h-8b": _size(
                "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", 4096, num_query_groups=8, ffn_hidden_size=21504,
                mamba_num_heads=128, max_position_embeddings=8192,
            ),
            "nemotron-3-nano-30b-a3b": _size(
                "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME", 2688, num_query_groups=2, ffn_hidden_size=1856,
                mamba_num_heads=64, max_position_embeddings=262144, num_experts=128, moe_ffn_hidden_size=1856,
                moe_shared_expert_intermediate_size=3712, moe_router_topk=6, moe_router_topk_scaling_factor=2.5,
                **_ROUTER,
            ),
        },
        defaults={
            **mamba.DEFAULTS,
            **dict.fromkeys(_WITHOUT_EFFECT),
            "vocab_size": 131072,
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_routed_experts": 8,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        parts=(
            named(_SIZES),
            one_of("mlp_hidden_act", {"relu2": "squared_relu", "silu": "silu"}, "activation", "MLPs without gates"),
            noted(attention_dropout="attention_dropout"),
            mamba.BIASES,
            only(mamba_hidden_act="silu", mamba_proj_bias=False),
            Part(_read_others, lambda config: {}),
            mamba.without_effect(*_WITHOUT_EFFECT),
            Part(_read_pattern, _write_pattern),
            Part(_read_experts, _write_experts),
        ),
        tensors=(*mamba.ENDS, *mamba.MAMBA, *_LAYERS),
        renamed={"model.": "backbone."},
    )
)  # fmt: skip
