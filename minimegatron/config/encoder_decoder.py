"""Fields of an encoder-decoder (T5): which layers encode, how a sample is divided, and buckets of relative positions.

The layers of both halves are one row, so a pipeline is cut, a checkpoint named and a plan made as for any model:

    num_layers = 4, encoder_num_layers = 2        0 1 | 2 3        0, 1 encode; 2, 3 decode, with cross attention

In the same way a sample is one row of `seq_length` positions: first the source, which the encoder reads, then the
target, `decoder_seq_length` positions. In pre-training both come from one piece of text (`data/span_corruption`):

    raw text                    L tokens, of which n = 0.15 L are noise, in n / 3 spans
    source                      L - n + n / 3 + 1    a sentinel in place of each span, the end of document
    target                      n + n / 3 + 1        each sentinel, its span, the end of document

`TransformerConfig` (config/model.py) inherits the fields. Raffel et al. 2020 (arXiv 1910.10683). Megatron-LM:
`relative_attention_num_buckets` and others in `megatron/training/arguments.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minimegatron.config.fields import MODEL, RUN, Config, divides, opt
from minimegatron.errors import ConfigError, DataError, require

if TYPE_CHECKING:
    from minimegatron.config.parallel import ParallelConfig

NOISE, SPAN = 0.15, 3.0  # share of the tokens that are noise, mean length of a span of them

# What an encoder-decoder does not have: the values that it needs.
_PLAIN: dict[str, Any] = {
    "softmax_type": "vanilla", "attn_logit_softcapping": None, "sliding_window": None, "multi_latent_attention": False,
    "hybrid_override_pattern": None, "linear_attention_freq": None, "num_experts": None, "mtp_num_layers": None,
    "layernorm_placement": "input", "transformer_impl": "local", "fp8_format": None, "value_head": False,
    "lora_rank": None, "bert_head": None, "position_embedding_type": "relative",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EncoderDecoderFields(Config):
    """An encoder, and a decoder with cross attention."""

    encoder_num_layers: int | None = opt(
        MODEL, None, "so many layers, the first ones, are an encoder (T5), the others a decoder with cross attention",
        least=1,
    )  # fmt: skip
    decoder_seq_length: int | None = opt(
        RUN, None, "positions of a sample that are the decoder's, its last ones; default what span corruption needs",
        least=1,
    )  # fmt: skip
    decoder_start_token_id: int = opt(MODEL, 0, "id with which the decoder begins, and which no source has", least=0)
    relative_attention_num_buckets: int = opt(
        MODEL, 32, "relative: distances are divided into so many buckets, each with a bias for every head", least=4
    )
    relative_attention_max_distance: int = opt(MODEL, 128, "relative: from here on all are in the last one", least=2)

    def parts_of(self, layer_number: int) -> tuple[str, ...]:
        """Those of a hybrid (`config/hybrid`); of a decoder `cross_attention` as well, of the encoder's last layer
        `final_layernorm`."""
        parts: tuple[str, ...] = super().parts_of(layer_number)  # type: ignore[misc]
        if self.encoder_num_layers is None or layer_number < self.encoder_num_layers - 1:
            return parts
        last = layer_number == self.encoder_num_layers - 1
        return (*parts, "final_layernorm" if last else "cross_attention")

    def _check_encoder_decoder(self, num_layers: int) -> None:
        """Check the encoder against the fields of the whole model, `self`."""
        encoder, relative = self.encoder_num_layers, self.position_embedding_type == "relative"  # type: ignore[attr-defined]
        if encoder is None:
            require(
                not relative,
                "position_embedding_type relative without encoder_num_layers",
                "give encoder_num_layers: only an encoder-decoder has relative positions here",
            )
            return
        require(
            encoder < num_layers,
            f"encoder_num_layers is {encoder}, and num_layers, which counts both halves, {num_layers}",
            f"num_layers of at least {encoder + 1}",
        )
        if self.model_class is not None:  # type: ignore[attr-defined]  # which says by itself what it does not have
            return
        other = {name: getattr(self, name) for name, value in _PLAIN.items() if getattr(self, name) != value}
        require(
            not other,
            f"encoder_num_layers={encoder} with {', '.join(f'{name}={value!r}' for name, value in other.items())}",
            ", ".join(f"{name}={_PLAIN[name]!r}" for name in other),
        )
        groups, heads = self.num_query_groups, self.num_attention_heads  # type: ignore[attr-defined]
        require(
            groups == heads,
            f"encoder_num_layers={encoder} with num_query_groups={groups} for {heads} heads: cross attention has keys "
            "and values of its own for each head",
            "drop num_query_groups",
        )
        backend = self.attention_backend  # type: ignore[attr-defined]
        require(
            backend in ("auto", "sdpa", "reference"),
            f"encoder_num_layers={encoder} with attention_backend {backend}: that program adds no bias to scores",
            "attention_backend=auto",
        )
        require(
            self.recompute_granularity != "full" or self.recompute_method == "uniform",  # type: ignore[attr-defined]
            "recompute_method block with encoder_num_layers: which layers are a stage's first ones?",
            "recompute_method=uniform",
        )
        buckets, far = self.relative_attention_num_buckets, self.relative_attention_max_distance
        require(buckets % 2 == 0, f"relative_attention_num_buckets is {buckets}", "an even number")
        require(
            far > buckets // 2,
            f"relative_attention_max_distance is {far}, and {buckets // 2} distances have a bucket of their own",
            f"at least {buckets // 2 + 1}",
        )

    def prompt_of(self, ids: Sequence[int], eod: int | None = None) -> list[int]:
        """The prompt of ids; that of an encoder-decoder is a source and the start of a target.

        Args:
            ids: of a text.
            eod: the source ends with it, as in training; None: with the last of `ids`.

        Raises:
            DataError: the source has the id with which a target begins.
        """
        if self.encoder_num_layers is None:
            return [*ids]
        start = self.decoder_start_token_id
        if start in ids:
            raise DataError(
                f"token id {start} is decoder_start_token_id, with which a target begins: no source has it",
                where=f"token {[*ids].index(start)} of the text",
                fix="a text without it",
            )
        return [*ids, *([eod] if eod is not None and [*ids[-1:]] != [eod] else []), start]

    def source_length(self, s: int) -> int:
        """How many positions of a row of s are the source.

        Raises:
            ConfigError: nothing is left for it, or the row is too short to be divided.
        """
        if self.decoder_seq_length is None:
            return corrupted_lengths(raw_length(s, of_both=True))[0]
        require(
            self.decoder_seq_length < s,
            f"decoder_seq_length is {self.decoder_seq_length}, and a row, source and target together, has {s} tokens",
            f"at most {s - 1}, or a larger seq_length",
        )
        return s - self.decoder_seq_length


def corrupted_lengths(raw: int) -> tuple[int, int]:
    """Lengths of the source and the target that span corruption makes of `raw` tokens."""
    noise, spans = noise_of(raw)
    return raw - noise + spans + 1, noise + spans + 1


def noise_of(raw: int) -> tuple[int, int]:
    """How many of `raw` tokens are noise, and in how many spans."""
    noise = min(max(round(raw * NOISE), 1), raw - 1)
    return noise, max(round(noise / SPAN), 1)


def raw_length(length: int, of_both: bool = False) -> int:
    """The largest number of tokens whose source, or whose source and target together, have at most `length`.

    Raises:
        ConfigError: there is none.
    """
    for raw in range(2 * length, 1, -1):
        source, target = corrupted_lengths(raw)
        if source + target * of_both <= length:
            return raw
    raise ConfigError(f"{length} tokens are too few for a source and a target", fix="a larger seq_length")


def check_encoder_decoder_fits(model: Any, parallel: ParallelConfig, seq_length: int | None) -> None:
    """Check an encoder-decoder against its layout and the length of its rows.

    Raises:
        ConfigError: with the rule, and what would work.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    require(
        cp == 1,
        f"context_parallel_size is {cp} with encoder_num_layers: a bias of every pair of positions is no rule by which "
        "a ring could cut them",
        "context_parallel_size=1; tensor_model_parallel_size divides heads and their biases",
    )
    if seq_length is None:
        return
    source = model.source_length(seq_length)
    if parallel.sequence_parallel:
        for length, what in ((source, "source"), (seq_length - source, "target")):
            divides(tp, length, "tensor_model_parallel_size (with sequence_parallel)", f"positions of the {what}")
