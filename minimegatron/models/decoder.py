"""The decoder-only language model: embedding, layers, output layer, loss.

    tokens [b, s] -> embedding -> [s, b, h] -> layers -> final norm -> logits [s, b, V'/t] -> loss of every token [b, s]

(V' is the padded vocabulary; s is s/t between the embedding and the logits with sequence parallelism.)

One class serves GPT-2, Llama, Mistral, Qwen and the rest by configuration (`models/families`). It returns the loss of
*every token*: the training step alone averages them, so that microbatches, data and context parallelism cannot each
average in their own way.

A pipeline stage holds some of the layers; `pre_process` says whether it has the embedding, `post_process` whether it
has the output layer. A tied output layer uses the embedding's matrix itself, or on another stage a copy of it
(`models/chunks`). Multi-token prediction follows the last layer and embeds tokens too: with it the last stage has a
copy of the whole embedding, and a tied output layer uses that copy.

Communication of a forward pass over tp: all-reduces of `s b h` elements, 1 for the embedding and 2 a layer, and three
all-reduces of `[s, b]` for the loss. The backward pass has 2 a layer and 1 for the output layer; embedding and loss
have none.

Megatron-LM: `megatron/core/models/gpt/gpt_model.py`; for layers with a state
`megatron/core/models/mamba/mamba_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.random import RngStreams
from minimegatron.comm.sequence import gather_tokens, local_tokens, positions
from minimegatron.config.fits import check_model_fits
from minimegatron.errors import DataError
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.dropout import Dropout
from minimegatron.layers.embedding import LanguageModelEmbedding
from minimegatron.layers.inference_context import InferenceContext, StateSpec
from minimegatron.layers.linear import ColumnParallelLinear, linear
from minimegatron.layers.logical import initialize
from minimegatron.layers.lora import add_lora, pack_base
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.layers.param import Init
from minimegatron.layers.rope import RotaryEmbedding
from minimegatron.layers.value_head import ValueHead
from minimegatron.layers.wgrad import WeightGradStore
from minimegatron.models.block import TransformerBlock
from minimegatron.models.contract import StageClass, Weights
from minimegatron.models.gpt_layer_specs import check_parts, decoder_layer_spec, prediction_spec, switch_precision
from minimegatron.models.spec import ModuleSpec, build_module
from minimegatron.parallel.pipeline.execution import Specs, Tensors, TensorSpec

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig


class GPTModel(StageClass, nn.Module):
    """A decoder, or one pipeline stage of it.

    Args:
        config: the model.
        mesh: its layout.
        spec: the spec of each layer; default `decoder_layer_spec`.
        pre_process: this stage has the embedding.
        post_process: this stage has the final norm, output layer and loss.
        layer_numbers: global numbers of the layers of this stage; default all.
        rng: dropout streams; needed when the model has dropout.

    Attributes:
        wgrad_store: where a tied output layer puts its wgrad, as a `ParallelLinear` does.

    Raises:
        ConfigError: the model does not fit the layout.
    """

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
        super().__init__()
        check_model_fits(config, mesh.parallel)
        check_parts(config, mesh.parallel)
        self.config = config
        self.mesh = mesh
        self.pre_process = pre_process
        self.post_process = post_process
        numbers = range(config.num_layers) if layer_numbers is None else layer_numbers
        predictions = prediction_spec(config) if post_process else None
        self.embedding = None
        if pre_process or predictions is not None:
            dropout = Dropout(config.hidden_dropout, rng, different_over_tp=mesh.sequence_parallel)
            self.embedding = LanguageModelEmbedding(config, mesh, dropout)
        self.rotary = RotaryEmbedding(config) if config.rotates else None
        spec = spec or decoder_layer_spec(config)
        self.decoder = TransformerBlock(config, mesh, spec, numbers, post_process, rng)
        self.mtp: Any = None if predictions is None else build_module(predictions, config, mesh, spec, rng)
        switch_precision(self, self.decoder, config, mesh)  # linear layers in FP8, if the configuration says so,
        add_lora(self, config)  # with adapters,
        pack_base(self, config)  # and with their matrices quantised under these (QLoRA)
        self.value_head = ValueHead(config, mesh) if config.value_head and post_process else None
        self.output_layer = None
        self.wgrad_store: WeightGradStore | None = None
        self._inputs: Tensors | None = None
        if post_process and (config.untie_embeddings_and_output_weights or self.embedding is None):
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                config.padded_vocab_size(mesh.tp.size),
                mesh.tp,
                init=Init(std=config.init_method_std),
                bias=False,
                sequence_parallel=mesh.sequence_parallel,
                rows=config.vocab_size,
                dtype=config.dtype,
            )

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Global number -> layer of this stage."""
        return {int(number): layer for number, layer in self.decoder.layers.items()}

    def layer_groups(self) -> list[tuple[list[nn.Module], bool]]:
        """The layers in the order in which they run, in groups, and whether a group is recomputed as a whole."""
        return self.decoder.groups(list(self.decoder.layers.values()))

    @property
    def ties_ends(self) -> bool:
        """Whether the first stage of the model and the last use the same weights."""
        return not self.config.untie_embeddings_and_output_weights or prediction_spec(self.config) is not None

    def tied_weights(self) -> Weights:
        """The weights of this stage that the first stage and the last both use; see `models/chunks`."""
        tied, predicts = not self.config.untie_embeddings_and_output_weights, prediction_spec(self.config) is not None
        weights: Weights = {}
        if self.embedding is not None and (tied or predicts):
            weights["embedding.word_embeddings.weight"] = self.embedding.word_embeddings, "weight"
        elif self.output_layer is not None and tied:
            weights["embedding.word_embeddings.weight"] = self.output_layer, "weight"
        if self.embedding is not None and self.embedding.position_embeddings is not None and predicts:
            weights["embedding.position_embeddings.weight"] = self.embedding.position_embeddings, "weight"
        return weights

    def stage_specs(self, b: int, s: int, compute_dtype: torch.dtype | None = None) -> tuple[Specs, Specs]:
        """Specs of this stage's input and output for a microbatch of tokens [b, s].

        Args:
            b, s: with context parallelism s is this rank's part.
            compute_dtype: dtype of activations, if it differs from that of the weights.
        """
        config, mesh = self.config, self.mesh
        dtype = compute_dtype or config.dtype
        dtype = torch.promote_types(dtype, torch.float32) if config.fp32_residual_connection else dtype
        rows = s // mesh.tp.size if mesh.sequence_parallel else s
        shape = None if mesh.parallel.variable_seq_lengths else torch.Size((rows, b, config.hidden_size))
        between = {"hidden": TensorSpec(shape, dtype)}
        return {} if self.pre_process else between, {} if self.post_process else between

    def set_input_tensor(self, inputs: Tensors | None) -> None:
        """Set the output of the previous stage, for the next `forward` (Megatron's name)."""
        self._inputs = inputs

    def forward(
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

        With context parallelism s below is s / cp, this rank's tokens (`comm/sequence.cut_batch`).

        Args:
            tokens: [b, s] ids; on later stages only their shape matters.
            position_ids: [b, s], or [3, b, s] for mrope; default the tokens' positions in the sequence.
            labels: [b, s] ids of the next tokens.
            document_ids: [b, s] of the *whole* sequence; tokens attend only inside their document.
            inference_context: in generation, the positions of the tokens and the states that layers keep.
            logits_at: [k], positions in a batch of one row; only the logits of these are computed, [k, 1, V'/t].
            inputs: the output of the previous stage (without `pre_process`); default that given to `set_input_tensor`.
            outputs: without labels: `logits`, or `hidden`; of a model with a value head `values`, or `both`.

        Returns:
            Loss of every token [b, s] in fp32 when there are labels, else logits [s, b, V'/t], the last hidden state
            [s', b, h], values [b, s] in fp32, or logits and values; before the last stage the input of the next one:
            {"hidden": [s, b, h]}.

        Raises:
            DataError: a sequence longer than the learned positions; in generation the engine has checked each sequence.

        Ids are not checked here, data sets do that. A token outside the padded vocabulary raises torch's IndexError; a
        label outside the vocabulary gives the loss inf.
        """
        position_ids = self.positions_of(tokens, position_ids, inference_context)
        rotary = self.rotary(position_ids) if self.rotary is not None else None
        context = AttentionContext(rotary, AttentionMask(document_ids=document_ids), inference_context)
        hidden = self.decoder(self._first_hidden(tokens, position_ids, inputs), context)
        if not self.post_process:
            return {"hidden": hidden}
        if self.mtp is not None and inference_context is not None:
            self.mtp.keep(hidden, 0, inference_context)
        if logits_at is not None:
            hidden = self._rows(hidden, logits_at)
        if labels is None:
            return self._outputs(hidden, outputs)
        losses = self._losses(hidden, labels)
        if self.mtp is not None and self.training and torch.is_grad_enabled():
            losses = self.mtp(losses, hidden, labels, context, partial(self._embed_ahead, position_ids), self._losses)
        return losses

    def positions_of(
        self, tokens: torch.Tensor, given: torch.Tensor | None, inference_context: InferenceContext | None = None
    ) -> torch.Tensor:
        """Position ids of tokens [b, s]: those of generation, those that are given, or 0, 1, 2 ... of this rank.

        Raises:
            DataError: a sequence longer than the learned positions; in generation the engine has checked each sequence.
        """
        b, n = tokens.shape
        if inference_context is not None:
            return inference_context.position_ids
        if self.config.position_embedding_type == "learned_absolute" and n > self.config.max_position_embeddings:
            raise DataError(
                f"a sequence of {n} tokens is longer than the {self.config.max_position_embeddings} learned positions",
                fix="shorten seq_length, or raise max_position_embeddings",
            )
        return positions(n * self.mesh.cp.size, self.mesh, tokens.device).expand(b, n) if given is None else given

    def predicted(
        self,
        depth: int,
        tokens: torch.Tensor,
        context: InferenceContext,
        before: torch.Tensor,
        logits_at: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run one depth of multi-token prediction on new tokens in generation (`models/mtp`).

        It reads each token, and the state that the depth before (0: the model) has made of the token before that one.

        Args:
            depth: from 1 on. Each token has at least `depth` tokens before it, of which depth - 1 has kept its states.
            tokens: [1, n] ids, as in `forward`.
            context: where they stand.
            before: [n], where the states of the token before each are kept; `context.rows` says it of the tokens.
            logits_at: [k] places in the row, or None.

        Returns:
            Logits of the tokens that follow these, [k, 1, V'/t]; None where none were asked for.
        """
        assert self.mtp is not None and self.embedding is not None, "the last stage of a model with depths"
        own = context.without_first(depth, [layer.layer_number for layer in self.mtp.layers])
        rotary = self.rotary(context.position_ids - depth) if self.rotary is not None else None
        embedded = self.embedding(tokens, context.position_ids)
        hidden = self.mtp.state_before(depth, before, own)
        hidden = self.mtp.layers[depth - 1](hidden, embedded, AttentionContext(rotary, AttentionMask(), own))
        self.mtp.keep(hidden, depth, own)
        return None if logits_at is None else self.logits(self._rows(hidden, logits_at))

    def _rows(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[s', 1, h] -> [k', 1, h]; with sequence parallelism k' is k / t, rounded up."""
        if not self.mesh.sequence_parallel:
            return hidden.index_select(0, places)
        tp, k = self.mesh.tp, len(places)
        places = F.pad(places, (0, -k % tp.size)).chunk(tp.size)[tp.rank]
        return c.gather_from_sequence_region(hidden, tp).index_select(0, places)

    def _first_hidden(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, inputs: Tensors | None, *more: torch.Tensor | None
    ) -> torch.Tensor:
        """[s', b, h] for the first layer of this stage: the tokens' embedding, or the output of the previous stage."""
        if self.pre_process:
            assert self.embedding is not None, "the first stage has the embedding"
            return self.embedding(tokens, position_ids, *more)
        if inputs is None:
            inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a stage without the embedding needs what the stage before has made"
        return inputs["hidden"]

    def _embed_ahead(self, position_ids: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
        """Embedding [s', b, h] of the ids [b, s] of the tokens k positions ahead, for `mtp`."""
        assert self.embedding is not None, "the stage that predicts several tokens embeds them"
        learned = self.embedding.position_embeddings is not None
        return self.embedding(ids, self.mtp.rolled(position_ids, k) if learned else position_ids)

    def _outputs(self, hidden: torch.Tensor, outputs: str) -> Any:
        if outputs in ("logits", "hidden"):
            return self.logits(hidden) if outputs == "logits" else hidden
        assert self.value_head is not None, "a model with a value head"
        values = self.value_head(hidden)
        return values if outputs == "values" else (self.logits(hidden), values)

    def _losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses [b, s] of the labels [b, s], from the last hidden state [s', b, h]."""
        return vocab_parallel_cross_entropy(
            self.logits(hidden),
            labels.t(),
            self.mesh.tp,
            vocab_size=self.config.vocab_size,
            kernels=self.config.kernels,
            over=True,  # nobody else reads these logits: their gradient may be written in their place
        ).t()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or [s/t, b, h]) -> [s, b, V'/t]."""
        if self.output_layer is not None:
            return self._capped(self.output_layer(hidden))
        weight, store = self.output_weight, self.wgrad_store
        return self._capped(linear(hidden, weight, None, self.mesh.tp, self.mesh.sequence_parallel, store))

    @property
    def output_weight(self) -> torch.Tensor:
        """The matrix of the output layer, this rank's rows [V'/t, h]; tied or not."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None, "a tied output layer needs the embedding on this stage"
        return self.embedding.word_embeddings.weight

    @torch.no_grad()
    def logits_of_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Some rows of hidden states that all tp ranks have alike, [n, h] -> [n, V'/t], without a gradient."""
        return self._capped(F.linear(hidden, self.output_weight))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def full_logits(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Logits [b, s, V] of the whole vocabulary and sequence on every tp and cp rank; without a gradient over cp.

        Args:
            tokens, position_ids: of the whole sequence.
            options: other arguments of `forward`, e.g. `inference_context` and `logits_at`.
        """
        if position_ids is not None:
            position_ids = local_tokens(position_ids, self.mesh, position_ids.dim() - 1)
        logits = c.gather_from_region(self(local_tokens(tokens, self.mesh, 1), position_ids, **options), self.mesh.tp)
        return gather_tokens(logits[..., : self.config.vocab_size].transpose(0, 1), self.mesh, 1)

    def inference_state(self) -> dict[int, dict[str, StateSpec]]:
        """Layer number -> state that the layer keeps of earlier tokens in generation.

        Raises:
            ConfigError: a layer has no `inference_state`.
        """
        return {number: layer.inference_state() for number, layer in self.layers.items()}  # type: ignore[operator]

    def prediction_state(self) -> dict[int, dict[str, StateSpec]]:
        """The same of the depths that are here, which only speculative decoding needs."""
        return {} if self.mtp is None else self.mtp.inference_state()  # type: ignore[no-any-return]


def build_model(
    config: TransformerConfig, mesh: Mesh, seed: int, spec: ModuleSpec | None = None, rng: RngStreams | None = None
) -> GPTModel:
    """The whole model of a rank without pipeline parallelism, on its device, initialised from `seed`."""
    with torch.device("meta"):
        model = GPTModel(config, mesh, spec, rng=rng)
    initialize(model, seed, mesh.device)
    return model
