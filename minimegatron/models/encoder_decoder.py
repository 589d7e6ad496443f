"""An encoder and a decoder in one row of layers (T5): relative positions, cross attention, a pipeline through both.

    source -> embedding -> encoder layers -> norm = memory ----+----------+
    target -> embedding -----------------------------------> decoder layers -> norm -> logits -> losses of the target

A sample is one row [b, s]: the source, then the target (`config/encoder_decoder`). So its shapes are those of a decoder
in every place that asks: batches, losses (0 at the source), messages of a pipeline, plans, the row of an engine.

**A pipeline** is cut anywhere. A stage sends the row as it is, [s, b, h]: what its encoder layers have made of the
source, the embedded target beside it; further on the memory, and what decoder layers have made of the target. The two
tables of biases (`layers/attention/relative`) are the first stage's and travel with the row, 32 x a/t numbers each.
Their gradient comes back the same way, and each stage adds its own: there are no copies to keep equal.

*Difference from Megatron-LM*, which has a copy of the table on every stage and sums their gradients.

| sent between stages | bytes of a microbatch in bf16 |
|---------------------|-------------------------------|
| the row             | 2 s b h                       |
| two tables          | 2 * 2 * 32 a/t                |

A tied output layer sees the hidden state times 1 / sqrt(h), one of its own does not. Generation is
`models/encoder_decoder_generation`.

Dropout is where a decoder has it (`models/block`). *Difference from T5*: none inside of the MLP or after the last norm.

Raffel et al. 2020 (arXiv 1910.10683). Megatron-LM: `megatron/core/models/T5/t5_model.py`, `t5_spec.py`, whose T5 is
another model (LayerNorm, biases, learned positions by default).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minimegatron.comm.random import RngStreams
from minimegatron.data.span_corruption import ADDED_IDS, SpanCorruption, check_span_corruption
from minimegatron.errors import ConfigError, DataError
from minimegatron.layers.attention.relative import (
    BiasedMask,
    Buckets,
    CrossAttention,
    CrossMask,
    MemoryContext,
    RelativeAttention,
    RelativePositionBias,
)
from minimegatron.layers.attention.self_attention import AttentionContext, SelfAttention
from minimegatron.layers.inference_context import InferenceContext, StateSpec
from minimegatron.layers.norm import Norm, add_norm
from minimegatron.layers.recompute import recompute_module
from minimegatron.models.block import TransformerBlock, TransformerLayer
from minimegatron.models.decoder import GPTModel
from minimegatron.models.encoder_decoder_generation import LENGTH, new_row
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec, build_module
from minimegatron.parallel.pipeline.execution import Specs, Tensors, TensorSpec

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig
    from minimegatron.config.run import RunConfig
    from minimegatron.data.tokenizer import Tokenizer


class EncoderLayer(TransformerLayer):
    """A transformer layer; the encoder's last one ends with the norm of the memory, wherever a pipeline is cut."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layer_number: int = 0,
        rng: RngStreams | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, mesh, layer_number, rng, **options)
        last = "final_layernorm" in config.parts_of(layer_number)
        self.final_layernorm = build_module(ModuleSpec(Norm), config) if last else None

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[s, b, h] -> [s, b, h] (both cut over the sequence with sequence parallelism)."""
        x = super().forward(x, context)
        return x if self.final_layernorm is None else self.final_layernorm(x)  # type: ignore[no-any-return]

    def inference_state(self) -> dict[str, StateSpec]:
        """Nothing: an encoder runs once."""
        return {}


class DecoderLayer(TransformerLayer):
    """x = x + attention(norm(x)); x = x + cross_attention(norm(x), memory); x = x + mlp(norm(x)).

    Args:
        submodules: those of `TransformerLayer`, `pre_cross_attn_layernorm` and `cross_attention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layer_number: int = 0,
        rng: RngStreams | None = None,
        *,
        submodules: dict[str, ModuleSpec],
        **options: Any,
    ) -> None:
        super().__init__(config, mesh, layer_number, rng, submodules=submodules, **options)
        self.pre_cross_attn_layernorm = build_module(submodules["pre_cross_attn_layernorm"], config)
        self.cross_attention = build_module(submodules["cross_attention"], config, mesh, layer_number, rng)
        if config.recomputes("layernorm"):
            recompute_module(self.pre_cross_attn_layernorm, rng)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """[n, b, h] -> [n, b, h] (both cut over the sequence with sequence parallelism); a `MemoryContext`."""
        assert self.mlp is not None, "a decoder's layer has all parts"
        normed, x = add_norm(self.pre_cross_attn_layernorm, x, self._attended(x, context))
        normed, x = add_norm(self.pre_mlp_layernorm, x, self.dropout(self.cross_attention(normed, context)))
        return x + self.dropout(self.mlp(normed))


def encoder_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """The layer of an encoder with this config."""
    spec = decoder_layer_spec(config)
    attention = ModuleSpec(SelfAttention, params={"core_attention": RelativeAttention})
    return dataclasses.replace(spec.with_submodule("self_attention", attention), module=EncoderLayer)


def with_cross_attention(spec: ModuleSpec) -> ModuleSpec:
    """The layer of a decoder, from that of its encoder."""
    cross = {"pre_cross_attn_layernorm": spec.submodules["pre_mlp_layernorm"]}
    cross["cross_attention"] = ModuleSpec(CrossAttention)
    return dataclasses.replace(spec, module=DecoderLayer, submodules={**spec.submodules, **cross})


class EncoderDecoderModel(GPTModel):
    """An encoder-decoder, or one pipeline stage of it: a `contract.ModelStage`.

    Args:
        spec: the spec of an encoder's layer; the decoder's has cross attention as well.
        others: as of `GPTModel`.

    Attributes:
        encoder_bias, decoder_bias: the tables, on the first stage.
        reads_device: where a target begins decides the shapes of a step.
        whole_prompts: an encoder sees all of a source.

    Raises:
        ConfigError: the model does not fit the layout.
    """

    reads_device = "where a row's targets begin decides what runs"
    whole_prompts = True
    megatron_lacks = "whose T5 is another model"
    added_ids = ADDED_IDS

    @classmethod
    def objective(cls, run: RunConfig, tokenizer: Tokenizer) -> SpanCorruption:
        """Spans that were taken from a text."""
        return SpanCorruption.of(run, tokenizer)

    @classmethod
    def check_run(cls, run: RunConfig) -> None:
        """Refuse other tasks, and masks of documents."""
        check_span_corruption(run)

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        spec: ModuleSpec | None = None,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        layer_numbers: Sequence[int] | None = None,
        rng: RngStreams | None = None,
    ) -> None:
        assert config.encoder_num_layers is not None, "the configuration of an encoder-decoder"
        numbers = range(config.num_layers) if layer_numbers is None else layer_numbers
        encoders = [n for n in numbers if n < config.encoder_num_layers]
        spec = spec or encoder_layer_spec(config)
        ends: dict[str, Any] = {"pre_process": pre_process, "post_process": post_process, "rng": rng}
        others = [n for n in numbers if n >= config.encoder_num_layers]
        super().__init__(config, mesh, with_cross_attention(spec), layer_numbers=others, **ends)
        self.encoder = TransformerBlock(config, mesh, spec, encoders, False, rng)
        for name in [name for name in ("decoder", "output_layer") if name in self._modules]:
            self._modules[name] = self._modules.pop(name)  # ZeRO-3 gathers units in the order of registration
        self.encoder_bias = RelativePositionBias(config, mesh) if pre_process else None
        self.decoder_bias = RelativePositionBias(config, mesh) if pre_process else None

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Global number -> layer of this stage."""
        return {int(number): layer for block in self._blocks for number, layer in block.layers.items()}

    @property
    def _blocks(self) -> tuple[TransformerBlock, TransformerBlock]:
        return self.encoder, self.decoder

    def layer_groups(self) -> list[tuple[list[nn.Module], bool]]:
        """The layers in the order in which they run, in groups, and whether a group is recomputed as a whole."""
        return [group for block in self._blocks for group in block.groups(list(block.layers.values()))]

    def stage_specs(self, b: int, s: int, compute_dtype: torch.dtype | None = None) -> tuple[Specs, Specs]:
        """The row, and the two tables; arguments as of `GPTModel.stage_specs`."""
        heads = self.config.num_attention_heads // self.mesh.tp.size
        shape = torch.Size((self.config.relative_attention_num_buckets, heads))
        known = None if self.mesh.parallel.variable_seq_lengths else shape
        table = TensorSpec(known, compute_dtype or self.config.dtype)
        ends = super().stage_specs(b, s, compute_dtype)
        takes, gives = ({**end, "bias_d": table, "bias_e": table} if end else {} for end in ends)
        return takes, gives

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        inference_context: InferenceContext | None = None,
        logits_at: torch.Tensor | None = None,
        inputs: Tensors | None = None,
        outputs: str = "logits",
    ) -> Any:
        """Run this stage, in training, evaluation or generation.

        Args:
            tokens: [b, s] ids: a source, then its target; in generation [1, n], the new tokens of all sequences.
            position_ids: not read: positions are relative.
            labels: [b, s] ids of the next tokens; those of the source are not read.
            document_ids: [b, s]; a token sees its own document in its own half, and a target also the source of its
                document. A source's padding has an id that no target has.
            others: as of `GPTModel.forward`.

        Returns:
            Loss of every token [b, s] in fp32 when there are labels, 0 at the source; else logits [s_t, b, V'/t] of
            the target, its last hidden state, or the input of the next stage.
        """
        if inputs is None:
            inputs, self._inputs = self._inputs, None
        if self.encoder_bias is not None and self.decoder_bias is not None:
            tables = self.encoder_bias(), self.decoder_bias()
        else:
            assert inputs is not None, "a stage without the embedding needs what the stage before has made"
            tables = inputs["bias_e"], inputs["bias_d"]
        far = self.config.relative_attention_max_distance
        of_encoder, of_decoder = Buckets(tables[0], True, far), Buckets(tables[1], False, far)
        if inference_context is not None:
            if self.pre_process:
                hidden = self._embedded(tokens)
            else:
                assert inputs is not None, "checked above"
                hidden = inputs["hidden"]
            start = self.config.decoder_start_token_id
            hidden = new_row(self._blocks, (of_encoder, of_decoder), tokens, hidden, inference_context, start)
            if self.post_process:
                return self.logits(hidden if logits_at is None else self._rows(hidden, logits_at))
            return {"hidden": hidden, "bias_e": tables[0], "bias_d": tables[1]}

        n = self.config.source_length(tokens.shape[1])
        rows = n // self.mesh.tp.size if self.mesh.sequence_parallel else n
        if self.pre_process:
            source, target = (self._embedded(part) for part in (tokens[:, :n], tokens[:, n:]))
        else:
            assert inputs is not None, "checked above"
            source, target = inputs["hidden"][:rows], inputs["hidden"][rows:]
        ids = (None, None) if document_ids is None else (document_ids[:, :n], document_ids[:, n:])
        if self.encoder.layers:
            mask = BiasedMask(False, None, ids[0], buckets=of_encoder).made(n)
            source = self.encoder(source, AttentionContext(None, mask))
        if self.decoder.layers:
            mask = BiasedMask(True, None, ids[1], buckets=of_decoder).made(tokens.shape[1] - n)
            cross = CrossMask(False, None, ids[1], source_ids=ids[0])
            context = MemoryContext(None, mask, memory=source, cross=cross)
        else:
            context = MemoryContext()
        target = self.decoder(target, context)
        if not self.post_process:
            return {"hidden": torch.cat([source, target]), "bias_e": tables[0], "bias_d": tables[1]}
        if labels is None:
            return self._outputs(target, outputs)
        losses = self._losses(target, labels[:, n:])
        return torch.cat([losses.new_zeros(len(losses), n), losses], 1)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None, "the first stage has the embedding"
        return self.embedding(tokens, tokens)  # type: ignore[no-any-return]  # no position is learned

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, b, h] (or [n/t, b, h]) -> [n, b, V'/t]."""
        return super().logits(self._scaled(hidden))

    @torch.no_grad()
    def logits_of_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `GPTModel.logits_of_rows`."""
        return super().logits_of_rows(self._scaled(hidden))

    def _scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        tied = not self.config.untie_embeddings_and_output_weights
        return hidden * self.config.hidden_size**-0.5 if tied else hidden

    # ---------------------------------------------------------------------------------------------- generation

    def check_generation(self) -> None:
        """Refuse a layout in which a row of any tokens cannot be computed.

        Raises:
            ConfigError: with sequence parallelism.
        """
        if self.mesh.sequence_parallel:
            raise ConfigError(
                "generation by an encoder-decoder with sequence_parallel: sources and targets of a row have any length",
                fix="build the model without it; weights are loaded into any layout",
            )

    def source_of(self, prompt: Sequence[int], where: str) -> int:
        """How many ids of a prompt are its source: those before the first `decoder_start_token_id`.

        Raises:
            DataError: there is no such id in it, or nothing before it.
        """
        start = self.config.decoder_start_token_id
        if start not in prompt[1:] or prompt[0] == start:
            raise DataError(
                f"a prompt of {len(prompt)} tokens without a source and, behind it, decoder_start_token_id {start}",
                where=where,
                fix=f"[*source, {start}]",
            )
        return prompt.index(start)

    def inference_state(self) -> dict[int, dict[str, StateSpec]]:
        """Keys and values of the decoder's layers; the first one here also keeps how long a source is."""
        state = super().inference_state()
        for number in [int(number) for number in self.decoder.layers][:1]:
            state[number] = {**state[number], LENGTH: StateSpec((1,), "sequence", torch.int64)}
        return state
