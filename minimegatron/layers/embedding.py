"""Embeddings: a vocabulary cut over ranks, and positions.

A 128 k x 16 k table is 4 GB, and each token needs one row of it. Cut the table by rows: each rank looks up the ids it
owns, returns zero for the others, and the sum over ranks is the answer, because exactly one rank owns each id.

    rank r owns ids [r V'/t, (r+1) V'/t)       V' = V padded to a multiple of (divisible_by * t)
    y = sum_r  own_r(id) * W_r[id - first_r]   all-reduce of [s, b, h], or reduce-scatter to [s/t, b, h]

The backward pass sends nothing: each rank adds the gradient rows of its own ids. On a CPU with data parallelism they go
straight into the gradient buffer (`layers/wgrad`): as many rows as there are tokens, where autograd makes a gradient as
large as the table and adds all of it. Positions are replicated; with sequence parallelism each rank adds those of its
own tokens, so their gradient is partial.

Megatron-LM: `VocabParallelEmbedding` in `tensor_parallel/layers.py`,
`models/common/embeddings/language_model_embedding.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.layers.norm import Norm
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.layers.wgrad import fused_accumulator

if TYPE_CHECKING:
    from minimegatron.comm.axis import Axis
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig
    from minimegatron.layers.dropout import Dropout


class _RowsIntoBuffer(torch.autograd.Function):
    """`F.embedding`, whose gradient is added to the table's gradient buffer row by row."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        accumulator, (ids,) = fused_accumulator(ctx.table), ctx.saved_tensors
        assert accumulator is not None, "it was there in the forward pass"
        accumulator.add_rows(ids.reshape(-1), grads[0].reshape(-1, grads[0].shape[-1]))
        return None, None


def embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`F.embedding`."""
    if torch.is_grad_enabled() and table.is_cpu and table.requires_grad and fused_accumulator(table) is not None:
        return _RowsIntoBuffer.apply(ids, table)  # type: ignore[no-any-return]
    return F.embedding(ids, table)


class VocabParallelEmbedding(nn.Module):
    """Rows of a [V', h] table for token ids.

    Args:
        num_embeddings: V', padded rows over all ranks.
        embedding_dim: h.
        tp: the axis that shares the table.
        init: initial values of the table; rows from `rows` on are padding and stay 0.
        rows: V, logical rows.
        sequence_parallel: return [s/t, b, h].
        dtype: dtype of the table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tp: Axis,
        *,
        init: Init,
        rows: int | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel and tp.size > 1
        parts = cut_evenly(num_embeddings, tp, f"VocabParallelEmbedding({num_embeddings}, {embedding_dim})")
        self.first, self.last = parts[tp.rank][0]
        self.rows = num_embeddings
        layout = ParamLayout((num_embeddings, embedding_dim), 0, parts, tp.rank, init, rows=rows or num_embeddings)
        self.weight = new_parameter(layout, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [b, s] of int64 -> [s, b, h] (or [s/t, b, h]).

        Raises:
            IndexError: torch's, of an id outside the table; on a GPU its assertion on the device.
        """
        ids = ids.t()
        if self.tp.size == 1:
            return embedding(ids, self.weight)
        # Ids of other ranks are those *of the table*. One outside it would belong to no rank, and be embedded as zeros;
        # left as it is, it is outside every part too, and the look-up refuses it as that of an uncut table does.
        foreign = (ids >= 0) & (ids < self.first) | (ids >= self.last) & (ids < self.rows)
        rows = embedding((ids - self.first).masked_fill(foreign, 0), self.weight)
        rows = rows.masked_fill(foreign.unsqueeze(-1), 0.0)
        return (
            c.reduce_scatter_to_sequence_region(rows, self.tp)
            if self.sequence_parallel
            else c.reduce_from_region(rows, self.tp)
        )


class LanguageModelEmbedding(nn.Module):
    """Token embeddings, times sqrt(h) if the model scales them, plus learned positions and segments if it has them; a
    norm, if the model norms residual sums; dropout.

    Args:
        config: the model.
        mesh: its layout.
        dropout: applied to the sum.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh, dropout: Dropout) -> None:
        super().__init__()
        self.config = config
        self.tp = mesh.tp
        self.sequence_parallel = mesh.sequence_parallel
        self.dropout = dropout
        # sqrt(h) in the dtype of the model, as those who trained with it have rounded it
        self.factor = torch.tensor(config.hidden_size**0.5, dtype=config.dtype, device="cpu").item()
        init = Init(std=config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size(mesh.tp.size),
            config.hidden_size,
            mesh.tp,
            init=init,
            rows=config.vocab_size,
            sequence_parallel=mesh.sequence_parallel,
            dtype=config.dtype,
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Module()
            shape = (config.max_position_embeddings, config.hidden_size)
            self.position_embeddings.weight = new_parameter(
                ParamLayout(shape, init=init, partial="sequence"), config.dtype
            )

        self.tokentype_embeddings = None
        if config.bert_head is not None and config.num_tokentypes:
            self.tokentype_embeddings = nn.Module()
            rows = ParamLayout((config.num_tokentypes, config.hidden_size), init=init, partial="sequence")
            self.tokentype_embeddings.weight = new_parameter(rows, config.dtype)
        self.layernorm = Norm(config) if config.norms_sums else None

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """tokens, position_ids, tokentype_ids (default 0) [b, s] -> [s, b, h] (or [s/t, b, h])."""
        x = self.word_embeddings(tokens)
        if self.config.scale_embeddings:
            x = x * self.factor
        if self.position_embeddings is not None:
            x = x + self._rows(position_ids, self.position_embeddings)
        if self.tokentype_embeddings is not None:
            x = x + self._rows(torch.zeros_like(tokens) if tokentype_ids is None else tokentype_ids,
                               self.tokentype_embeddings)  # fmt: skip
        if self.layernorm is not None:
            x = self.layernorm(x)
        if self.config.fp32_residual_connection:
            x = x.float()
        return self.dropout(x)

    def _rows(self, ids: torch.Tensor, table: nn.Module) -> torch.Tensor:
        """ids [b, s] -> rows [s, b, h] of a replicated table (or [s/t, b, h])."""
        ids = c.local_part(ids.t(), self.tp, 0) if self.sequence_parallel else ids.t()
        return F.embedding(ids, table.weight)  # type: ignore[arg-type]
