"""DeepSeek-V3: latent attention, sigmoid routing in groups with a bias for balance, shared experts.

Its first layers are dense. The weight of a token's experts is divided by their sum and multiplied by a factor.

DeepSeek-AI, arXiv:2412.19437.
"""

from __future__ import annotations

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, T, sizes


def _read_latents(keys: Keys) -> Fields:
    heads, rotated = int(keys["num_attention_heads"]), int(keys["qk_rope_head_dim"])
    keys.only("num_key_value_heads", heads)
    keys.only("qk_head_dim", int(keys["qk_nope_head_dim"]) + rotated)
    if keys["head_dim"] is not None:
        keys.only("head_dim", rotated)
    keys.only("rms_norm_eps", 1e-6)  # theirs has it, whatever the file says, in the norms of the latents
    return {
        "multi_latent_attention": True,
        "num_query_groups": heads,
        "kv_channels": int(keys["qk_nope_head_dim"]) + rotated,
        "q_lora_rank": keys["q_lora_rank"],
        "kv_lora_rank": int(keys["kv_lora_rank"]),
        "qk_head_dim": int(keys["qk_nope_head_dim"]),
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": int(keys["v_head_dim"]),
        "rotary_interleaved": bool(keys["rope_interleave"]),
    }


def _write_latents(config: TransformerConfig) -> Fields:
    return {
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "head_dim": config.qk_pos_emb_head_dim,
        "rope_interleave": config.rotary_interleaved,
    }


def _read_experts(keys: Keys) -> Fields:
    layers, dense, k = (int(keys[x]) for x in ("num_hidden_layers", "first_k_dense_replace", "num_experts_per_tok"))
    groups, kept = int(keys["n_group"] or 1), int(keys["topk_group"] or 1)
    keys.only("norm_topk_prob", k > 1, f"with num_experts_per_tok={k} is not supported")  # a lone weight stays as it is
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("moe_layer_freq", 1)
    if groups > 1 and k != 2 * kept:
        raise ConfigError(
            f"num_experts_per_tok ({k}) with topk_group ({kept}) is not supported: a group is worth its two best "
            "experts there, its num_experts_per_tok / topk_group best here",
            fix="use a model with num_experts_per_tok = 2 topk_group",
        )
    return {
        "num_experts": int(keys["n_routed_experts"]),
        "moe_layer_freq": like.pattern([i >= dense for i in range(layers)]),
        "moe_ffn_hidden_size": int(keys["moe_intermediate_size"]),
        "moe_shared_expert_intermediate_size": int(keys["moe_intermediate_size"]) * int(keys["n_shared_experts"]),
        "moe_router_topk": k,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": kept if groups > 1 else None,
        "moe_router_topk_scaling_factor": float(keys["routed_scaling_factor"]),
    }


def _write_experts(config: TransformerConfig) -> Fields:
    return {
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.moe_ffn_hidden_size,
        "first_k_dense_replace": sum(not has for has in config.expert_layers),
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "norm_topk_prob": config.moe_router_topk > 1,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        # Of DeepSeek's own code, which others than transformers read; and there is no layer of a further prediction.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


def _low_rank(config: TransformerConfig) -> bool:
    return config.q_lora_rank is not None


_ATTENTION = (
    Row(L + "self_attention.linear_q_proj.weight", (T + "self_attn.q_proj.weight",), when=lambda c: not _low_rank(c)),
    Row(L + "self_attention.linear_q_down_proj.weight", (T + "self_attn.q_a_proj.weight",), when=_low_rank),
    Row(L + "self_attention.q_layernorm.weight", (T + "self_attn.q_a_layernorm.weight",), when=_low_rank),
    Row(L + "self_attention.linear_q_up_proj.weight", (T + "self_attn.q_b_proj.weight",), when=_low_rank),
    Row(L + "self_attention.linear_kv_down_proj.weight", (T + "self_attn.kv_a_proj_with_mqa.weight",)),
    Row(L + "self_attention.kv_layernorm.weight", (T + "self_attn.kv_a_layernorm.weight",)),
    Row(L + "self_attention.linear_kv_up_proj.weight", (T + "self_attn.kv_b_proj.weight",)),
    Row(L + "self_attention.linear_proj.weight", (T + "self_attn.o_proj.weight",)),
)
_BIAS = Row(
    L + "mlp.router.expert_bias",
    (T + "mlp.gate.e_score_correction_bias",),
    when=lambda config: config.moe_router_enable_expert_bias,
    on="moe",
)

register(
    Family(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        fields={
            **like.FIELDS,
            "multi_latent_attention": True,
            "rotary_interleaved": True,
            "layernorm_epsilon": 1e-6,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        presets={
            "deepseek-v3": sizes(
                61,
                7168,
                128,
                129280,
                ffn_hidden_size=18432,
                q_lora_rank=1536,
                kv_lora_rank=512,
                num_experts=256,
                moe_layer_freq="([0]*3+[1]*58)",
                moe_ffn_hidden_size=2048,
                moe_shared_expert_intermediate_size=2048,
                moe_router_topk=8,
                moe_router_num_groups=8,
                moe_router_group_topk=4,
                moe_router_topk_scaling_factor=2.5,
                rope_scaling_type="yarn",
                rope_scaling_factor=40.0,
                rope_scaling_original_max_position_embeddings=4096,
                yarn_mscale=1.0,
                yarn_mscale_all_dim=1.0,
                max_position_embeddings=163840,
            ),
        },
        defaults={
            **like.DEFAULTS,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "attention_bias": False,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        parts=(
            like.SIZES,
            like.GATE,
            like.DROPOUT,
            like.biases("attention_bias"),
            like.rope("yarn"),
            Part(_read_latents, _write_latents),
            Part(_read_experts, _write_experts),
        ),
        tensors=(
            *like.ENDS,
            *_ATTENTION,
            *like.MLP,
            *like.experts(*like.GATED_MLP),
            *like.shared_experts("shared_experts"),
            _BIAS,
        ),
    )
)
