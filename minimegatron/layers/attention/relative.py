"""Attention with a learned bias for every distance, and attention to an encoder's output: T5's two kinds.

    scores = q k^T + B        B[head, i, j] = table[bucket(j - i), head]         no factor 1 / sqrt(d)

The table has a row for each bucket of distances and a column for each head: 32 x a numbers, for all layers of a stack.
An encoder's and a decoder's buckets differ, because a decoder looks back only:

| bidirectional (encoder), n = 32          | causal (decoder), n = 32                |
|------------------------------------------|-----------------------------------------|
| half of them for keys after the query    | all for keys before it                  |
| distances 0 to 7 one by one              | 0 to 15 one by one                      |
| 8 to 127 in 8 buckets, logarithmically   | 16 to 127 in 16                         |
| everything from 128 on in the last one   | the same                                |

The bias belongs to a head, so tp cuts columns as it cuts heads, and each rank's gradient is complete. All pairs of one
distance have the same: 2 s - 1 rows are looked up, and the s x s biases are windows on these.

**Cross attention** takes queries from the decoder, keys and values from the encoder's output (the *memory*), and has
neither a bias nor an order; documents of a row keep apart as everywhere. A target whose document has no source gets 0.

    q = x A_q^T     k, v = memory A_kv^T     y = softmax(q k^T) v A_proj^T         cut over heads, as self-attention

**Generation.** A sequence is source, then target. Each token has one place in the pages of a decoder layer: a source
token's holds the key and value of cross attention, which are computed once, a target token's those of self-attention.
So nothing is kept twice, and no page is another kind of page.

Raffel et al. 2020 (arXiv 1910.10683), section 2.1; the buckets are those of Mesh TensorFlow, as in transformers.
Megatron-LM: `megatron/core/models/common/embeddings/relative_pos_embedding.py`, `CrossAttention` in
`megatron/core/transformer/attention.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.kernels import ops
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.inference_context import InferenceContext, LayerState, StateSpec
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.layers.recompute import recompute_module

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.comm.random import RngStreams
    from minimegatron.config import TransformerConfig


def relative_position_bucket(
    distance: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """The bucket of each distance, of the same shape, int64.

    Args:
        distance: position of a key minus that of a query.
        bidirectional: keys after the query have buckets of their own; else theirs is bucket 0.
        num_buckets, max_distance: see the module docstring.
    """
    first = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first, distance = (distance > 0).long() * num_buckets, distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = num_buckets // 2
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return first + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=num_buckets - 1))


class RelativePositionBias(nn.Module):
    """The table [buckets, a / t] of one stack.

    Args:
        config: buckets, heads.
        mesh: its tp axis divides the heads.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__()
        heads = config.num_attention_heads
        parts = cut_evenly(heads, mesh.tp, "the biases of relative positions")
        shape = config.relative_attention_num_buckets, heads
        self.weight = new_parameter(
            ParamLayout(shape, 1, parts, mesh.tp.rank, Init(std=config.init_method_std)), config.dtype
        )

    def forward(self) -> torch.Tensor:
        """A copy of the table that other stages of a pipeline can be sent."""
        return self.weight.clone()


@dataclasses.dataclass(frozen=True)
class Buckets:
    """A table, and the rule of its rows.

    Attributes:
        table: [buckets, a'].
        bidirectional, max_distance: see `relative_position_bucket`.
    """

    table: torch.Tensor
    bidirectional: bool
    max_distance: int

    def at(self, distance: torch.Tensor) -> torch.Tensor:
        """distance [...] -> biases [..., a']."""
        return F.embedding(
            relative_position_bucket(distance, self.bidirectional, len(self.table), self.max_distance), self.table
        )

    def square(self, s: int) -> torch.Tensor:
        """[1, a', s, s], for queries and keys 0 to s - 1."""
        row = self.at(torch.arange(1 - s, s, device=self.table.device)).t()  # of distances 1 - s to s - 1
        return row.unfold(1, s, 1).flip(1)[None]


@dataclasses.dataclass(frozen=True, eq=False)
class BiasedMask(AttentionMask):
    """A mask with a bias for every pair that it shows.

    Args:
        buckets: of the stack.
        sources: in generation, [r], how many tokens of each sequence, the first ones, are its source.
    """

    buckets: Buckets | None = None
    sources: torch.Tensor | None = None

    def made(self, s: int) -> BiasedMask:
        """The mask with its biases for s tokens: layers that are recomputed must find them, and not make them again."""
        self.dense(s)
        return self

    def plain(self, s: int) -> bool:
        """Never: the bias is a table."""
        return False

    def dense(self, s: int, device: torch.device | None = None) -> torch.Tensor:
        """[1 or b, a', s, s]: biases, and -inf where the query does not see the key."""
        assert self.buckets is not None, "a mask of a stack"
        if "dense" not in self._cache:
            bias = self.buckets.square(s)
            if self.causal or self.document_ids is not None:
                bias = bias.masked_fill(~self.table((0, s), (0, s), bias.device), -torch.inf)
            self._cache["dense"] = bias
        return self._cache["dense"]  # type: ignore[no-any-return]

    def of_kept(self, places: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """In generation, the same for targets at `places` [r, n] of their sequences and keys 0 to m - 1:
        [r, a', n, m]."""
        assert self.buckets is not None and self.sources is not None, "the mask of a decoder in generation"
        if "kept" not in self._cache:
            distance = keys - places[..., None]
            seen = (distance <= 0) & (keys >= self.sources[:, None, None])
            self._cache["kept"] = self.buckets.at(distance).permute(0, 3, 1, 2).masked_fill(~seen[:, None], -torch.inf)
        return self._cache["kept"]  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, eq=False)
class CrossMask(AttentionMask):
    """Which target sees which source: all, or those of its document.

    Args:
        source_ids: [b, m] of the sources; those of the targets are `document_ids` [b, n]. Both None: all.
        sources: see `BiasedMask`.
    """

    causal: bool = False
    source_ids: torch.Tensor | None = None
    sources: torch.Tensor | None = None

    def plain(self, s: int) -> bool:
        """Whether all see all."""
        return self.source_ids is None

    def dense(self, s: int, device: torch.device | None = None) -> torch.Tensor | None:
        """[b, 1, n, m] bool; None where all see all."""
        if self.source_ids is None or self.document_ids is None:
            return None
        return self.document_ids[:, None, :, None] == self.source_ids[:, None, None]

    def of_kept(self, places: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[r, 1, n, m] bool; see `BiasedMask.of_kept`."""
        assert self.sources is not None, "the mask of a decoder in generation"
        return (keys < self.sources[:, None])[:, None, None].expand(-1, -1, places.shape[1], -1)


@dataclasses.dataclass(frozen=True)
class MemoryContext(AttentionContext):
    """The context of a decoder.

    Attributes:
        memory: the encoder's output [m, b, h] ([m/t, b, h] with sequence parallelism); in generation that of the new
            source tokens [k, 1, h], None where there are none.
        cross: which target sees which of it.
        sources: in generation, the new source tokens of all sequences, if there are any.
    """

    memory: torch.Tensor | None = None
    cross: CrossMask = CrossMask()
    sources: InferenceContext | None = None


class RelativeAttention(CoreAttention):
    """The core of both kinds: scores are added to what the mask's table says, by torch's function or by the formula."""

    supports_context_parallel = False

    def backend_for(self, q: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> str:
        """The formula if it is asked for, else torch's function."""
        return "reference" if self.backend == "reference" else "sdpa"

    def _reference(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        table = mask.dense(q.shape[2], q.device)
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        if table is not None:
            scores = scores.masked_fill(~table, -torch.inf) if table.dtype == torch.bool else scores + table
        blind = (scores == -torch.inf).all(-1, keepdim=True)  # softmax over nothing would be NaN
        weights = scores.softmax(-1).masked_fill(blind, 0.0)
        return self.dropout(weights.to(q.dtype)) @ v

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        table = mask.dense(q.shape[2], q.device)
        with self.dropout.stream():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=table, dropout_p=self._dropout_p, scale=self.scale)

    def inference_state(self) -> dict[str, StateSpec]:
        """The key and the value of each token: a source's of cross attention, a target's of self-attention."""
        heads = self.config.num_attention_heads // self.mesh.tp.size
        return {name: StateSpec((heads, self.config.kv_channels), by_head=True) for name in ("key", "value")}

    def generate(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask, state: LayerState
    ) -> torch.Tensor:
        """Keep the keys and values of new targets, and attend to those kept: q [n, 1, a', d] -> [n, 1, a' d]."""
        keep(state, state.context, k, v)
        return self.attend_kept(q, mask, state)

    def attend_kept(self, q: torch.Tensor, mask: Any, state: LayerState) -> torch.Tensor:
        """Attend to the pages of each query's sequence, as far as the mask shows them."""
        context = state.context
        table, size = context.page_table.long(), state.pages("key").shape[1]
        keys = torch.arange(table.shape[1] * size, device=q.device)
        own = (keys < context.lengths[:, None])[..., None, None]  # what follows may hold anything
        k, v = (
            state.pages(name)[table].flatten(1, 2).masked_fill(~own, 0.0).transpose(1, 2) for name in ("key", "value")
        )
        shown = mask.of_kept(state.padded(context.position_ids.t()).t(), keys)
        q = state.padded(q).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=shown, scale=self.scale)
        return state.unpadded(out.permute(2, 0, 1, 3)).flatten(2)


def keep(state: LayerState, tokens: InferenceContext, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store keys and values [n, 1, a', d] of these tokens in the pages of a layer."""
    for name, new in (("key", k), ("value", v)):
        ops.keep_tokens(new.flatten(0, 1), state.pages(name), tokens.rows)


class CrossAttention(nn.Module):
    """Queries of the decoder, keys and values of the encoder's output; heads are divided over tp.

    Args:
        config: the model.
        mesh: its layout.
        layer_number: global number from 0.
        rng: dropout streams.
        column, row: classes of the linear layers; same signatures as those of `layers/linear.py`.

    Raises:
        ConfigError: heads cannot be divided over tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layer_number: int = 0,
        rng: RngStreams | None = None,
        column: Callable[..., Any] = ColumnParallelLinear,
        row: Callable[..., Any] = RowParallelLinear,
    ) -> None:
        super().__init__()
        self.layer_number, self.d = layer_number, config.kv_channels
        h, width = config.hidden_size, config.num_attention_heads * config.kv_channels
        how: dict[str, Any] = {
            "bias": config.add_bias_linear,
            "sequence_parallel": mesh.sequence_parallel,
            "dtype": config.dtype,
        }
        init = Init(std=config.init_method_std)
        self.linear_q = column(h, width, mesh.tp, init=init, **how)
        self.linear_kv = column(h, 2 * width, mesh.tp, init=init, blocks=2, **how)
        self.core_attention = RelativeAttention(config, mesh, rng)
        if config.recomputes("core_attn"):
            recompute_module(self.core_attention, rng)
        self.linear_proj = row(width, h, mesh.tp, init=Init(std=config.output_init_std), **how)

    def keys_and_values(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[m, b, h] -> [m, b, a', d] each."""
        return tuple(t.unflatten(-1, (-1, self.d)) for t in self.linear_kv(memory).chunk(2, -1))

    def forward(self, x: torch.Tensor, context: MemoryContext) -> torch.Tensor:
        """x [n, b, h] -> [n, b, h] (both cut over the sequence with sequence parallelism)."""
        q = self.linear_q(x).unflatten(-1, (-1, self.d))
        state = context.state_of(self.layer_number)
        if state is None:
            assert context.memory is not None, "a decoder is given what its encoder has made"
            out = self.core_attention(q, *self.keys_and_values(context.memory), context.cross)
        else:
            if context.sources is not None and context.memory is not None:
                keep(state, context.sources, *self.keys_and_values(context.memory))
            out = self.core_attention.attend_kept(q, context.cross, state)
        return self.linear_proj(out)  # type: ignore[no-any-return]
