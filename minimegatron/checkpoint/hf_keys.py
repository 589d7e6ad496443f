"""The keys of a Hugging Face `config.json`: each is read, known to be without effect, or refused.

The problem in a sentence: a key that a reader does not know, or one that is missing and gets a default of ours, gives a
model that runs and says something else.

A file leaves out what equals the default of its family's class, and the classes differ: Mixtral's RoPE has base 1e6
where the others have 1e4, Qwen3's heads have 128 channels whatever h / a is. `DEFAULTS` holds what this package reads,
as the classes of transformers 5 have it (null is a value: Mistral without `sliding_window` has a window of 4096, with
`"sliding_window": null` it has none).

`Keys` hands out values and remembers which were asked for; what is left over at the end is refused, unless `HARMLESS`
says that it changes nothing about logits. A key that the family's class does not have is not read, whoever asks for it:
`sliding_window` is Mistral's and no key of Llama's, where transformers passes over it. So neither this reader nor an
export, which is believed when it has been read back, can say what nobody else would understand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from minimegatron.errors import ConfigError

_GATED: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": 32,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "head_dim": None,
}
_QWEN: dict[str, Any] = {
    **_GATED,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "reorder_and_upcast_attn": False,
    },
    "llama": {
        **_GATED,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        **_GATED,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "mixtral": {
        **_GATED,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
    "qwen2_moe": {
        **_QWEN,
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    "qwen3_moe": {
        **{key: value for key, value in _QWEN.items() if key not in ("max_window_layers", "layer_types")},
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "attention_bias": False,
    },
    "deepseek_v3": {
        **_GATED,
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
}

# RoPE's, of every family that has it: in one table, or as they were before transformers 5.
ROPE = frozenset(("rope_parameters", "rope_scaling", "rope_theta"))
# Other names of a key, by family; transformers accepts each.
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}

# Without effect on logits. Dropout and the weights of penalties are choices of a training, not of a model.
HARMLESS = frozenset(
    """
    model_type architectures transformers_version _name_or_path name_or_path auto_map dtype torch_dtype torchscript
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout
    use_cache cache_implementation return_dict output_hidden_states output_attentions output_router_logits
    router_aux_loss_coef aux_loss_alpha seq_aux pretraining_tp ep_size num_nextn_predict_layers n_ctx
    chunk_size_feed_forward problem_type id2label label2id num_labels finetuning_task task_specific_params
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty length_penalty num_beams
    num_return_sequences no_repeat_ngram_size bad_words_ids early_stopping diversity_penalty num_beam_groups
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    begin_suppress_tokens suppress_tokens remove_invalid_values output_scores return_dict_in_generate
    attn_implementation _attn_implementation _attn_implementation_autoset max_window_layers
    """.split()
)
# Harmless as long as they say this, in a family that does not read them.
ONLY: dict[str, Any] = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "use_bfloat16": False,
    "use_mrope": False,
    "pruned_heads": {},
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}


class Keys(Mapping[str, Any]):
    """A file's keys over the defaults of its family; remembers what was read.

    Args:
        hf: what `config.json` holds.
        family: its `model_type`; of another dictionary in the file, its name.

    Raises:
        ConfigError: two names of one key with different values.
    """

    def __init__(self, hf: Mapping[str, Any], family: str) -> None:
        self.family, self._given = family, dict(hf)
        for other, name in ALIASES.get(family, {}).items():
            if other in self._given:
                value = self._given.pop(other)
                if self._given.setdefault(name, value) != value:
                    raise ConfigError(
                        f"{other}={value!r} and {name}={self._given[name]!r} say the same thing differently",
                        fix="keep one of them",
                    )
        defaults = DEFAULTS.get(family)
        has = self._given.keys() if defaults is None else defaults.keys() | (ROPE if "rope_theta" in defaults else ())
        self._values = {**(defaults or {}), **{k: v for k, v in self._given.items() if k in has}}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        self._read.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def only(self, key: str, wanted: Any, why: str = "is not supported") -> None:
        """Read a key that may have one value, which is also what it means where it is missing.

        Raises:
            ConfigError: it has another.
        """
        self._read.add(key)
        value = self._values.get(key, self._given.get(key, wanted))
        if value != wanted:
            raise ConfigError(f"{key}={value!r} {why}", fix=f"use a model with {key}={wanted!r}")

    def finish(self) -> None:
        """Everything has been read.

        Raises:
            ConfigError: naming the keys that were not read.
        """
        for key, wanted in ONLY.items():
            if key not in self._read:
                self.only(key, wanted)
        left = {k: v for k, v in self._given.items() if k not in self._read | HARMLESS and v is not None}
        if left:
            shown = ", ".join(f"{key}={str(value)[:60]}" for key, value in sorted(left.items()))
            raise ConfigError(
                f"a {self.family} configuration with {shown} is not supported: it might be another model",
                fix="take out of config.json what you know to be without effect, or use another model",
            )
