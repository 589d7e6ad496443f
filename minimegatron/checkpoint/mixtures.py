"""What Hugging Face's configurations of models with experts say, in our fields.

| family        | router                                                                              |
|---------------|---------------------------------------------------------------------------------------|
| `mixtral`     | softmax over the chosen; every layer has experts                                      |
| `qwen3_moe`   | the same, or with `norm_topk_prob` off the chosen of a softmax over all               |
| `qwen2_moe`   | the same as `qwen3_moe`; a shared expert with a gate                                  |
| `deepseek_v3` | sigmoid with a bias, groups, a factor; shared experts; latent attention               |

The weights of penalties (`router_aux_loss_coef`) are a choice of training and are not taken over; theirs is a loss over
all layers at once and k times ours.

Softmax over all and then dividing by the sum of the chosen, as Hugging Face has it, is the softmax over the chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minimegatron.checkpoint.hf_keys import Keys
from minimegatron.errors import ConfigError


def mixtral(hf: Keys) -> dict[str, Any]:
    """Fields of `TransformerConfig` from a Mixtral `config.json`."""
    return {
        "num_experts": int(hf["num_experts"]),
        "moe_router_topk": int(hf["num_experts_per_tok"]),
        "moe_input_jitter_eps": float(hf["router_jitter_noise"] or 0.0) or None,
    }


def qwen3_moe(hf: Keys) -> dict[str, Any]:
    """Fields of `TransformerConfig` from a Qwen3-MoE `config.json`."""
    layers, step, dense = int(hf["num_hidden_layers"]), int(hf["decoder_sparse_step"]), hf["mlp_only_layers"] or []
    return {
        "num_experts": int(hf["num_experts"]),
        "moe_router_topk": int(hf["num_experts_per_tok"]),
        "moe_ffn_hidden_size": int(hf["moe_intermediate_size"]),
        "moe_layer_freq": _pattern([i not in dense and (i + 1) % step == 0 for i in range(layers)]),
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
    }


def qwen2_moe(hf: Keys) -> dict[str, Any]:
    """Fields of `TransformerConfig` from a Qwen2-MoE `config.json`."""
    shared = int(hf["shared_expert_intermediate_size"])
    return {**qwen3_moe(hf), "moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}


def deepseek_v3(hf: Keys) -> dict[str, Any]:
    """Fields of `TransformerConfig` from a DeepSeek-V3 `config.json`.

    Raises:
        ConfigError: an option that has no counterpart here.
    """
    layers, dense, k = int(hf["num_hidden_layers"]), int(hf["first_k_dense_replace"]), int(hf["num_experts_per_tok"])
    groups, kept = int(hf["n_group"] or 1), int(hf["topk_group"] or 1)
    hf.only("norm_topk_prob", True)
    hf.only("scoring_func", "sigmoid")
    hf.only("topk_method", "noaux_tc")
    hf.only("moe_layer_freq", 1)
    heads, rotated = int(hf["num_attention_heads"]), int(hf["qk_rope_head_dim"])
    hf.only("num_key_value_heads", heads)
    hf.only("qk_head_dim", int(hf["qk_nope_head_dim"]) + rotated)
    if hf["head_dim"] is not None:
        hf.only("head_dim", rotated)
    hf.only("rms_norm_eps", 1e-6)  # theirs has it, whatever the file says, in the norms of the latents
    if groups > 1 and k != 2 * kept:
        raise ConfigError(
            f"num_experts_per_tok ({k}) with topk_group ({kept}) is not supported: a group is worth its two best "
            "experts there, its num_experts_per_tok / topk_group best here",
            fix="use a model with num_experts_per_tok = 2 topk_group",
        )
    return {
        "multi_latent_attention": True,
        "num_query_groups": heads,
        "kv_channels": int(hf["qk_nope_head_dim"]) + rotated,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": int(hf["kv_lora_rank"]),
        "qk_head_dim": int(hf["qk_nope_head_dim"]),
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": int(hf["v_head_dim"]),
        "rotary_interleaved": bool(hf["rope_interleave"]),
        "num_experts": int(hf["n_routed_experts"]),
        "moe_layer_freq": _pattern([i >= dense for i in range(layers)]),
        "moe_ffn_hidden_size": int(hf["moe_intermediate_size"]),
        "moe_shared_expert_intermediate_size": int(hf["moe_intermediate_size"]) * int(hf["n_shared_experts"]),
        "moe_router_topk": k,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": kept if groups > 1 else None,
        "moe_router_topk_scaling_factor": float(hf["routed_scaling_factor"]),
    }


MIXTURES: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
}


def _pattern(has_experts: list[bool]) -> str:
    return "[" + ",".join("1" if has else "0" for has in has_experts) + "]"
