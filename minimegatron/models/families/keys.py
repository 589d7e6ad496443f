"""The keys of a Hugging Face `config.json`: each is read, known to be without effect, or refused.

The problem in a sentence: a reader that ignores a key, or gives a missing key another default, builds a model that runs
and computes something else.

A file leaves out what equals the default of its family's class, and the classes differ: Mixtral's RoPE has base 1e6
where the others have 1e4, Qwen3's heads have 128 channels whatever h / a is. A family's `defaults` are those of the
classes of transformers 5, for the keys that this package reads (null is a value: Mistral without `sliding_window` has a
window of 4096, with `"sliding_window": null` it has none).

`Keys` hands out values and remembers which were asked for; a key that is left over at the end is refused, unless
`HARMLESS` says that it does not change logits. A key that the family's class does not have is not read: transformers
ignores `sliding_window` in a file of Llama, and so does this reader. So what is read here, or exported and read back,
means the same to transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from minimegatron.errors import ConfigError

# RoPE's, of every family that has it: in one table, or as they were before transformers 5.
ROPE = frozenset(("rope_parameters", "rope_scaling", "rope_theta"))
# Without effect on logits. Dropout and the weights of penalties are choices of a training, not of a model.
HARMLESS = frozenset(
    """
    model_type architectures transformers_version _name_or_path name_or_path auto_map dtype torch_dtype torchscript
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    initializer_range attention_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout
    use_cache cache_implementation return_dict output_hidden_states output_attentions output_router_logits
    router_aux_loss_coef aux_loss_alpha seq_aux pretraining_tp ep_size num_nextn_predict_layers n_ctx
    chunk_size_feed_forward problem_type id2label label2id num_labels finetuning_task task_specific_params
    gradient_checkpointing classifier_dropout
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty length_penalty num_beams
    num_return_sequences no_repeat_ngram_size bad_words_ids early_stopping diversity_penalty num_beam_groups
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    begin_suppress_tokens suppress_tokens remove_invalid_values output_scores return_dict_in_generate
    time_step_rank classifier_dropout dropout_rate initializer_factor n_positions
    image_seq_length ignore_index projection_dim
    video_token_id vision_start_token_id vision_end_token_id vision_token_id tokens_per_second
    attn_implementation _attn_implementation _attn_implementation_autoset max_window_layers _sliding_window_pattern
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
    """A file's keys over the defaults of its family; remembers which were read.

    Args:
        hf: the contents of `config.json`.
        family: its `model_type`; for a dictionary inside the file, its name.
        defaults: those of the family's class; None for a dictionary whose keys are all read.
        aliases: other names of a key, which transformers accepts.

    Raises:
        ConfigError: two names of one key with different values.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        family: str,
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.family, self._given = family, dict(hf)
        for other, name in (aliases or {}).items():
            if other in self._given:
                value = self._given.pop(other)
                if self._given.setdefault(name, value) != value:
                    raise ConfigError(
                        f"{other}={value!r} and {name}={self._given[name]!r} say the same thing differently",
                        fix="keep one of them",
                    )
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
        """Read a key with one supported value, which is also its default.

        Raises:
            ConfigError: the key has another value.
        """
        self._read.add(key)
        value = self._values.get(key, self._given.get(key, wanted))
        if value != wanted:
            raise ConfigError(f"{key}={value!r} {why}", fix=f"use a model with {key}={wanted!r}")

    def finish(self) -> None:
        """Check that every key has been read.

        Raises:
            ConfigError: with the keys that were not read.
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
