"""Which fields of a configuration make it another model.

Of the fields of kind `MODEL` (`config/fields`) some are read only beside others: the sizes of experts by a model that
has some, the factor of a RoPE scaling by the kinds that have one. Two configurations are the same model if all fields
that are read are equal. A conversion is refused unless what it has written is the same model when it is read again.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config.fields import MODEL
from minimegatron.config.model import TransformerConfig

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def mathematics(config: TransformerConfig) -> dict[str, Any]:
    """The fields that decide what the model says: of kind MODEL, without those that nothing reads."""
    published = TransformerConfig.names_of(MODEL)
    fields = {name: value for name, value in config.to_dict().items() if name in published}
    unread = list(_LATENT)
    if config.multi_latent_attention:
        unread = ["num_query_groups", "rotary_percent", "kv_channels"]
    if not all(config.windowed_layers):
        fields["sliding_window"] = [config.window_of(number) for number in range(config.num_layers)]
    if config.softmax_scale == config.replace(softmax_scale=None).score_scale:
        fields["softmax_scale"] = None
    unread.append("window_attn_skip_freq")
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
