"""BERT: an encoder, whose tokens see each other in both directions, and its heads.

    tokens [b, s] -> embedding of words, positions, segments -> [s, b, h] -> layers -> logits [s, b, V'/t] of all words
                                                                                    -> logits [b, 2] of the pair

It differs from `GPTModel` in three places, and shares its stages, its tied embedding and its layers:

| place   | BERT                                                                                                      |
|---------|-----------------------------------------------------------------------------------------------------------|
| mask    | not causal. A row that is padded has two documents, its tokens and its padding (`attention/mask`)         |
| norms   | of the residual sums (`layernorm_placement` residual: BERT as published), or before attention and MLP     |
|         | (input: Megatron-LM's BERT)                                                                               |
| heads   | `layers/bert_heads`: words, and pairs of text                                                             |

**One loss for each token** is what a stage returns, so the loss of the pair has to be some token's. It is that of the
first, [CLS], which is never a masked word: `labels[:, 0]` is the class of the pair. Over cp this is the rank that holds
the first token; the others compute their heads too, without effect, so that all ranks gather the same weights. What the
two losses weigh is the data's business (`data/bert_dataset`).

Devlin et al. 2019 (arXiv 1810.04805); Shoeybi et al. 2019 (arXiv 1909.08053), section 5.3, for norms before attention
and MLP. Megatron-LM: `megatron/core/models/bert/bert_model.py`, where a padded query sees no key at all, and
`bert_layer_specs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from minimegatron.comm.sequence import local_tokens, rank_spans
from minimegatron.data.whole_words import MARKS, MaskedWords
from minimegatron.errors import ConfigError, require
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.bert_heads import BertLMHead, Pooler, WholeLinear
from minimegatron.models.contract import Weights
from minimegatron.models.decoder import GPTModel
from minimegatron.models.spec import ModuleSpec
from minimegatron.parallel.pipeline.execution import Tensors

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig
    from minimegatron.config.run import RunConfig
    from minimegatron.data.tokenizer import Tokenizer


class BertModel(GPTModel):
    """BERT, or one pipeline stage of it. Words of its samples are hidden (`data/whole_words`).

    Args:
        config: the model; `bert_head` says which heads it has.
        mesh: its layout.
        spec: the spec of each layer; default `decoder_layer_spec`.
        stage: the other arguments of `GPTModel`.

    Raises:
        ConfigError: the model does not fit the layout.
    """

    predicts_next = False
    pads = True
    added_ids = len(MARKS)

    @classmethod
    def objective(cls, run: RunConfig, tokenizer: Tokenizer) -> MaskedWords:
        """Hidden words, and pairs of texts."""
        return MaskedWords.of(tokenizer, run.data.mask_prob, pairs=run.model.bert_head == "lm_and_binary")

    @classmethod
    def check_run(cls, run: RunConfig) -> None:
        """A BERT learns hidden words, from samples of its own."""
        names = ("sequence_packing", "reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        given = [name for name in names if getattr(run.data, name)]
        given += [f"minimegatron {run.task_name}"] * (run.task is not None)
        require(
            not given and run.model.bert_head != "pooler",
            f"bert_head {run.model.bert_head}{' with ' * bool(given)}{', '.join(given)}: words are hidden in a sample "
            "of one text or a pair, and a head has to predict them",
            "minimegatron train --bert-head lm, or lm_and_binary, without these",
        )

    def __init__(self, config: TransformerConfig, mesh: Mesh, spec: ModuleSpec | None = None, **stage: Any) -> None:
        super().__init__(config, mesh, spec, **stage)
        words, pooled = config.bert_head in ("lm", "lm_and_binary"), config.bert_head in ("pooler", "lm_and_binary")
        self.lm_head = BertLMHead(config, mesh) if self.post_process and words else None
        self.pooler = Pooler(config, mesh) if self.post_process and pooled else None
        binary = self.post_process and config.bert_head == "lm_and_binary"
        self.binary_head = WholeLinear(config, config.hidden_size, 2) if binary else None
        if not words:
            self.output_layer = None

    @property
    def ties_ends(self) -> bool:
        """Whether the first stage of the model and the last use the same weights."""
        return self.config.bert_head != "pooler" and super().ties_ends

    def tied_weights(self) -> Weights:
        """The weights of this stage that the first stage and the last both use; see `models/chunks`."""
        return super().tied_weights() if self.ties_ends else {}

    def check_generation(self) -> None:
        """Refuse generation.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"generation by a BERT (bert_head {self.config.bert_head}): its tokens see those behind them, so none is "
            "predicted from the ones before it",
            fix="a decoder generates; of a BERT ask `full_logits` of masked words, or `hidden` and `pooled` states",
        )

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        tokentype_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        inputs: Tensors | None = None,
        outputs: str = "logits",
    ) -> Any:
        """Run this stage.

        With context parallelism s below is s / cp, this rank's tokens (`comm/sequence.cut_batch`).

        Args:
            tokens: [b, s] ids; on later stages only their shape matters.
            position_ids: [b, s]; default the tokens' positions in the sequence.
            labels: [b, s] ids of the words that stand there; at place 0 of the sequence the class of the pair, 0 if the
                second text follows the first.
            tokentype_ids: [b, s], the segment of each token; default 0.
            document_ids: [b, s] of the *whole* sequence: 0 for a row's tokens, 1 for its padding (`mask.padded`).
            inputs: the output of the previous stage (without `pre_process`); default that given to `set_input_tensor`.
            outputs: without labels: `logits`, `hidden`, `pooled`, or `both`.

        Returns:
            Loss of every token [b, s] in fp32 when there are labels. Else the logits of words [s, b, V'/t], the last
            hidden state [s', b, h], that of the first token behind the pooler [b, h], or the logits of words and of the
            pair [b, 2]. Before the last stage the input of the next one: {"hidden": [s', b, h]}.

        Raises:
            DataError: a sequence longer than the learned positions.
            ConfigError: the model has no head for this.
        """
        position_ids = self.positions_of(tokens, position_ids)
        rotary = self.rotary(position_ids) if self.rotary is not None else None
        context = AttentionContext(rotary, AttentionMask(causal=False, document_ids=document_ids))
        hidden = self.decoder(self._first_hidden(tokens, position_ids, inputs, tokentype_ids), context)
        if not self.post_process:
            return {"hidden": hidden}
        if labels is not None:
            return self._losses(hidden, labels)
        if outputs == "hidden":
            return hidden
        if outputs == "pooled":
            return self._need(self.pooler, "pooled")(hidden)
        logits = self.logits(hidden)
        return logits if outputs == "logits" else (logits, self.pair_logits(hidden))

    def full_logits(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """As `GPTModel.full_logits`; `tokentype_ids` are of the whole sequence."""
        if (types := options.get("tokentype_ids")) is not None:
            options["tokentype_ids"] = local_tokens(types, self.mesh, 1)
        return super().full_logits(tokens, position_ids, **options)

    def _losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses [b, s] of words and, at place 0 of the sequence, of the pair."""
        losses = super()._losses(hidden, labels)
        if self.binary_head is None:
            return losses
        s = labels.shape[1] * self.mesh.cp.size
        here = rank_spans(s, self.mesh)[0][0] == 0  # this cp rank has the first token
        logits = self.pair_logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        pair = F.cross_entropy(logits, labels[:, 0] if here else torch.zeros_like(labels[:, 0]), reduction="none")
        first = pair if here else losses[:, 0] + 0.0 * pair
        return torch.cat([first.to(losses.dtype)[:, None], losses[:, 1:]], 1)

    def pair_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or [s/t, b, h]) -> [b, 2]: the second text follows the first, or does not."""
        pooled = self._need(self.pooler, "pairs")(hidden)
        return self._need(self.binary_head, "pairs")(pooled)  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or [s/t, b, h]) -> [s, b, V'/t]."""
        head = self._need(self.lm_head, "words")
        return super().logits(head(hidden)) + head.bias

    def _need(self, head: Any, what: str) -> Any:
        if head is None:
            raise ConfigError(
                f"bert_head {self.config.bert_head}: the model has no head for {what}",
                fix="bert_head lm predicts words, lm_and_binary words and pairs; pooler has neither",
            )
        return head
