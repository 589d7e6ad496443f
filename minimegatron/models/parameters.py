"""How many parameters a model has, by its configuration alone."""

from __future__ import annotations

from minimegatron.config import TransformerConfig


def count_parameters(config: TransformerConfig, active: bool = False) -> int:
    """Parameters of the logical model, padding of the vocabulary not counted.

    Args:
        config: the model.
        active: of the experts count only the k that a token passes.
    """
    h, layers = config.hidden_size, config.num_layers
    norm = h * (2 if config.normalization == "LayerNorm" else 1)
    with_experts = sum(config.expert_layers)
    layer = 2 * norm * (config.norms_input + config.norms_output) + (
        _latent_attention(config) if config.multi_latent_attention else _attention(config)
    )
    depths = config.mtp_num_layers or 0  # each a layer like the last, three more norms and the projection
    tail = depths * (layer + 3 * norm + 2 * h * h)
    layers, with_experts = layers + depths, with_experts + depths * config.has_experts(layers)
    mlps = (layers - with_experts) * _mlp(config, config.ffn_hidden_size) + with_experts * _experts(config, active)
    tables = config.vocab_size * h * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        tables += config.max_position_embeddings * h
    return config.num_layers * layer + tail + mlps + norm + tables


def _attention(config: TransformerConfig) -> int:
    h, d = config.hidden_size, config.kv_channels
    a, rows = config.num_attention_heads, (config.num_attention_heads + 2 * config.num_query_groups) * d
    count = h * rows + a * d * h
    count += rows if config.add_bias_linear or config.add_qkv_bias else 0
    count += h if config.add_bias_linear else 0
    if config.qk_layernorm_over_heads:
        return count + (config.num_attention_heads + config.num_query_groups) * d
    return count + (2 * d * (2 if config.normalization == "LayerNorm" else 1) if config.qk_layernorm else 0)


def _latent_attention(config: TransformerConfig) -> int:
    h, a, d, r = config.hidden_size, config.num_attention_heads, config.kv_channels, config.kv_lora_rank
    per_norm = 2 if config.normalization == "LayerNorm" else 1
    q = config.q_lora_rank
    count = h * a * d if q is None else h * q + per_norm * q + q * a * d
    count += h * (r + config.qk_pos_emb_head_dim) + per_norm * r
    return count + r * a * (config.qk_head_dim + config.v_head_dim) + a * config.v_head_dim * h


def _mlp(config: TransformerConfig, f: int) -> int:
    h, rows = config.hidden_size, f * (2 if config.gated_linear_unit else 1)
    return h * rows + f * h + (rows + h if config.add_bias_linear else 0)


def _experts(config: TransformerConfig, active: bool) -> int:
    """Of one layer; the bias that no gradient moves is not counted."""
    if config.num_experts is None:
        return 0
    many = config.moe_router_topk if active else config.num_experts
    shared = config.moe_shared_expert_intermediate_size
    count = many * _mlp(config, config.moe_ffn_hidden_size) + config.num_experts * config.hidden_size
    return count + (_mlp(config, shared) + config.hidden_size * config.moe_shared_expert_gate if shared else 0)
