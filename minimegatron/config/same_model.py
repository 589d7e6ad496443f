"""Which fields a run reads, and whether two configurations are the same model.

A field may be read only if another has some value: the factor of a RoPE scaling only if there is one, the sizes of
experts only in a model with experts. `NEEDS` lists these conditions. A field that is given and not read is no error,
because published command lines have such options; the log names it (`RunConfig.not_read`), and a checkpoint may have
another value of it (`training/same_run`).

Two configurations are the same model if all fields of kind `MODEL` (`config/fields`) that are read are equal. A
conversion is refused unless what it has written is the same model when it is read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from minimegatron.config.fields import MODEL
from minimegatron.config.model import TransformerConfig

# Fields -> conditions on other fields: `name` (given, or switched on), `name=a|b`, `name>1`.
NEEDS = {
    "rotary_base rotary_interleaved rope_scaling_type": "position_embedding_type=rope|mrope",
    "rotary_base_local": "sliding_window position_embedding_type=rope|mrope",
    "rotary_percent": "position_embedding_type=rope|mrope multi_latent_attention=False",
    "kv_channels num_query_groups": "multi_latent_attention=False",
    "rope_scaling_factor": "rope_scaling_type=linear|llama3|yarn",
    "rope_scaling_low_freq_factor rope_scaling_high_freq_factor": "rope_scaling_type=llama3",
    "rope_scaling_original_max_position_embeddings": "rope_scaling_type=llama3|yarn",
    "yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim": "rope_scaling_type=yarn",
    "yarn_correction_range_round_to_int": "rope_scaling_type=yarn",
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim": "multi_latent_attention",
    "glu_linear_offset activation_func_clamp_value": "activation=quick_geglu",
    "mtp_loss_scaling_factor": "mtp_num_layers",
    "num_tokentypes mask_prob": "bert_head",
    "vision_hidden_size vision_num_attention_heads vision_ffn_hidden_size vision_patch_size": "vision_num_layers",
    "vision_temporal_patch_size vision_spatial_merge_size vision_image_size": "vision_num_layers",
    "vision_model_type": "vision_num_layers",
    "vision_window_size vision_fullatt_block_indexes": "vision_num_layers vision_model_type=qwen_vit",
    "mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups": "hybrid_override_pattern",
    "mamba_conv_kernel mamba_dt_limit_min mamba_dt_limit_max mamba_chunk_size": "hybrid_override_pattern",
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim": "linear_attention_freq",
    "linear_value_head_dim linear_conv_kernel_dim linear_chunk_size": "linear_attention_freq",
    "decoder_seq_length decoder_start_token_id": "encoder_num_layers",
    "relative_attention_num_buckets relative_attention_max_distance": "encoder_num_layers",
    "attention_output_gate": "multi_latent_attention=False",
    "lora_alpha lora_target_modules lora_base": "lora_rank",
    "lora_base_bits lora_base_group_size": "lora_base",
    "recompute_method recompute_num_layers": "recompute_granularity=full",
    "recompute_modules": "recompute_granularity=selective",
    "moe_router_bias_update_rate": "moe_router_enable_expert_bias",
    "moe_token_drop_policy": "moe_expert_capacity_factor",
    "expert_tensor_parallel_size moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size": "num_experts",
    "moe_shared_expert_gate moe_router_topk moe_router_score_function moe_router_pre_softmax": "num_experts",
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk": "num_experts",
    "moe_router_enable_expert_bias": "num_experts",
    "cp_comm_type": "context_parallel_size>1",
    "variable_seq_lengths": "pipeline_model_parallel_size>1",
    "overlap_grad_reduce": "use_torch_fsdp2=False",
    "lr_wsd_decay_style lr_wsd_decay_iters": "lr_decay_style=WSD",
    "start_weight_decay end_weight_decay": "weight_decay_incr_style=linear|cosine",
    "adam_beta1 adam_beta2 adam_eps": "optimizer=adam|muon|dist_muon",
    "sgd_momentum": "optimizer=sgd",
    "muon_momentum muon_use_nesterov muon_split_qkv muon_scale_mode": "optimizer=muon|dist_muon",
    "muon_extra_scale_factor muon_num_ns_steps muon_coefficient_type": "optimizer=muon|dist_muon",
    "muon_fp32_matmul_prec": "optimizer=muon|dist_muon",
    "muon_tp_mode": "optimizer=muon|dist_muon tensor_model_parallel_size>1",
    "use_precision_aware_optimizer": "optimizer_cpu_offload=False",
    "store_param_remainders": (
        "use_precision_aware_optimizer main_params_dtype=fp32 params_dtype=bf16 use_torch_fsdp2=False"
    ),
    "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d": "optimizer_cpu_offload",
    "use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params": "optimizer_cpu_offload",
    "loss_scale": "params_dtype=fp16",
    "initial_loss_scale min_loss_scale loss_scale_window hysteresis": "params_dtype=fp16 loss_scale=None",
    "eval_iters save_keep_best": "eval_interval",
    "split": "mock_data=False train_data_path=()",
    "wandb_exp_name wandb_entity wandb_save_dir": "wandb_project",
    "trackio_exp_name": "trackio_project",
    "cuda_graph_scope cuda_graph_warmup_steps": "cuda_graph_impl=local",
    "profile_step_start profile_step_end profile_ranks profile_dir": "profile",
    "corpus_path corpus_key corpus_megabytes": "corpus",
    "max_completion_length rl_max_num_seqs rl_inference_dtype": "lmbda",
    "rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size": "lmbda",
    "rl_inference_expert_model_parallel_size": "lmbda",
}
OF_ATTENTION = {"num_attention_heads", "num_query_groups", "kv_channels", "attention_output_gate"}
CONDITIONS = {name: conditions.split() for names, conditions in NEEDS.items() for name in names.split()}


def unmet(name: str, value_of: Callable[[str], Any]) -> str:
    """The condition of `NEEDS` because of which a field is not read, for itself or for a field that it needs; "" if it
    is
    read.

    Args:
        name: name of the field.
        value_of: name of a field -> its value.
    """
    for condition in CONDITIONS.get(name, ()):
        other, sign, wanted = re.fullmatch(r"(\w+)([=>]?)(.*)", condition).groups()  # type: ignore[union-attr]
        value = value_of(other)
        if sign == "=":
            met = str(value) in wanted.split("|")
        else:
            met = value > int(wanted) if sign else value not in (None, False)
        if not met or (condition := unmet(other, value_of)):
            return condition
    return ""


def mathematics(config: TransformerConfig) -> dict[str, Any]:
    """The fields that decide what the model computes: those of kind MODEL that are read."""
    fields = {name: getattr(config, name) for name in config.to_dict() if name in TransformerConfig.names_of(MODEL)}
    unread = {name for name in fields if unmet(name, lambda other: getattr(config, other))}
    unread |= {"window_attn_skip_freq"} | (
        set() if config.position_embedding_type == "learned_absolute" else {"max_position_embeddings"}
    )
    if not all(config.windowed_layers):
        fields["sliding_window"] = [config.window_of(number) for number in range(config.num_layers)]
    fields["linear_attention_freq"] = config.linear_layers if config.has("gated_delta_net") else None
    if config.softmax_scale == config.replace(softmax_scale=None).score_scale:
        fields["softmax_scale"] = None
    if config.num_experts is not None:
        fields["moe_layer_freq"] = config.expert_layers
        fields["sinkhorn"] = "sinkhorn" in str(config.moe_router_load_balancing_type)
    unread |= set() if config.has("mlp") else {"ffn_hidden_size"}
    unread |= set() if config.has("mlp") or config.has("moe") else {"activation"}
    unread |= set() if config.has("self_attention") else OF_ATTENTION
    unread |= set() if config.has("mamba") else {name for name in fields if name.startswith("mamba_")}
    return {name: value for name, value in fields.items() if name not in unread}


def differing(here: TransformerConfig, there: TransformerConfig) -> list[str]:
    """`field: value here, value there` for each field that makes the two different models."""
    one, other = mathematics(here), mathematics(there)
    return [
        f"{name}: {one.get(name)!r} here, {other.get(name)!r} there"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
