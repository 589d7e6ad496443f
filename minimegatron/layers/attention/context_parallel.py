"""Context parallelism: attention over a sequence of which each rank holds a part.

Everything in a transformer acts on one token at a time, except attention, where a token needs the keys and values of
all tokens before it. Four ways to bring them together; C ranks, n = s/C tokens each, a query heads and g groups of
width d on each rank:

| `cp_comm_type` | messages                              | elements sent by a rank, forward     | needs               |
|----------------|---------------------------------------|--------------------------------------|---------------------|
| `p2p`          | K, V round a ring, while one computes | 2 (C-1) n b g d                      | C blocks to overlap |
| `allgather`    | K, V to all ranks, before             | 2 (C-1) n b g d                      | memory for all K, V |
| `a2a`          | heads for tokens: q, k, v; then out   | (C-1)/C n b (2a + 2g') d             | a divisible by C    |
| `a2a+p2p`      | a2a over C1 neighbours, then a ring of C2 = C/C1 | both, see below           | a divisible by C1   |

(g' is g, copied until it is a multiple of C: with fewer groups than ranks each rank still gets a key/value head.)

**Ring.** The blocks of K and V go round (`comm/ring`), and each rank attends to a block while it has it. In the
backward pass the blocks go round again, and the gradient of each block follows one step behind it: every rank adds its
part, and the last one sends the sum to the owner. That makes C-1 messages of K, V and C-1 of dK, dV (in fp32): twice
the elements of the forward pass. **All-gather** brings the same blocks at once; dK, dV are reduce-scattered in fp32.

**All-to-all** (Ulysses). Afterwards each rank has *all* tokens of a/C heads, so any attention works unchanged, and a
second all-to-all brings the output back. Nothing overlaps, but the volume falls with C. **Hierarchical**: all-to-all
inside `cp_inner` (fast links), ring over `cp_outer` (slow ones), whose blocks have C1 times the tokens and a C1-th of
the heads.

Ring and all-gather see some of the keys at a time: `layers/attention/pieces` attends to them and joins the results.
RoPE is applied before, with the tokens' positions in the whole sequence.

Liu et al. 2023 (arXiv 2310.01889); Brandon et al. 2023 (arXiv 2311.09431) for the balance; Jacobs et al. 2023 (arXiv
2309.14509), Fang, Zhao 2024 (arXiv 2405.07719). Megatron-LM: `megatron/core/extensions/transformer_engine.py`; the
algorithms are in Transformer Engine (`dot_product_attention/context_parallel.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.comm.ring import Shift, circulate
from minimegatron.comm.sequence import Spans, spans_of
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.pieces import Joined, attend, attend_backward, sink_gradient

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask, torch.Tensor | None], torch.Tensor]


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask,
    mesh: Mesh,
    scale: float,
    backend: str,
    whole: Attend,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the whole sequence.

    Args:
        q: [n, b, a, d], this rank's tokens as `comm/sequence` cuts them.
        k, v: [n, b, g, d].
        mask: which query sees which key, in positions of the whole sequence.
        mesh: its cp axes share the sequence, by `mesh.parallel.cp_comm_type`.
        scale: factor of the scores.
        backend: the backend for pieces, see `pieces.attend`.
        whole: attention over a whole sequence, q [s, b, a', d], k and v [s, b, g', d] -> [s, b, a', d]; used where only
            heads are exchanged.
        softcap: cap of the scores, see `pieces.attend`.
        sink: [a], the score of one more key with the value 0 for each head, see `pieces`; its gradient is partial over
            cp.

    Returns:
        [n, b, a, d].
    """
    inner, outer = mesh.cp_inner, mesh.cp_outer
    q, k, v = scatter_heads(q, k, v, inner)
    if sink is not None and inner.size > 1:
        sink = sink.chunk(inner.size)[inner.rank]
    if outer.size == 1:
        out = whole(q, k, v, mask, sink)
    else:
        if inner.size > 1:
            q = q.contiguous()  # kept for the backward pass; as a view of what arrived it would keep k and v alive
        gathers = mesh.parallel.cp_comm_type == "allgather"
        out = piecewise_attention(q, k, v, mask, outer, scale, backend, softcap, sink, gathers)
    return gather_heads(out, inner)


def piecewise_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask,
    axis: Axis,
    scale: float,
    backend: str,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    gathers: bool = False,
) -> torch.Tensor:
    """Attention over the blocks of keys of all ranks of an axis, also of one: q, k, v as of `context_attention`.

    Args:
        gathers: an all-gather brings the blocks, not a ring.
    """
    s = q.shape[0] * axis.size
    spans = [spans_of(s, (r, axis.size)) for r in range(axis.size)]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    function = _AllGatherAttention if gathers else _RingAttention
    return function.apply(q, k, v, sink, mask, axis, spans, scale, backend, softcap).permute(2, 0, 1, 3)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------- all-to-all


def scatter_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange heads for tokens, in one message: q [n, b, a, d] -> [n C, b, a/C, d], k and v [.., g', d] alike."""
    if axis.size == 1:
        return q, k, v
    copies = axis.size // math.gcd(axis.size, k.shape[2])
    if copies > 1:  # their gradients are summed by autograd
        k, v = (t.repeat_interleave(copies, 2) for t in (k, v))
    sizes = [t.shape[2] // axis.size for t in (q, k, v)]
    for_each = torch.cat([t.unflatten(2, (axis.size, -1)) for t in (q, k, v)], 3)  # [n, b, C, heads, d]
    arrived = c.all_to_all_region(for_each.permute(2, 0, 1, 3, 4).flatten(0, 1), axis)
    q, k, v = arrived.split(sizes, 2)
    return q, k, v


def gather_heads(out: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Exchange tokens for heads: [n C, b, a/C, d] -> [n, b, a, d]."""
    if axis.size == 1:
        return out
    arrived = c.all_to_all_region(out, axis).unflatten(0, (axis.size, -1))  # [C, n, b, a/C, d]
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


# ------------------------------------------------------------------------------------------------------- ring


class _RingAttention(torch.autograd.Function):
    """q [b, a, n, d], k and v [b, g, n, d] of this rank -> out [b, a, n, d]; keeps q, k, v, out and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        mask: AttentionMask,
        axis: Axis,
        spans: list[Spans],
        scale: float,
        backend: str,
        softcap: float | None,
    ) -> torch.Tensor:
        own, joined = spans[axis.rank], Joined(q)

        def visit(owner: int, kv: torch.Tensor) -> None:
            attend(joined, q, own, kv[0], kv[1], spans[owner], mask, scale, backend, softcap)

        kv = torch.stack((k, v))
        circulate(kv, axis, visit)
        if sink is not None:
            joined.add_sink(sink)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, joined.lse, sink)
        ctx.rest = mask, axis, spans, scale, backend, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, kv, out, lse, sink = ctx.saved_tensors
        mask, axis, spans, scale, backend, softcap = ctx.rest
        dout, dq = grads[0].contiguous(), torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        home = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)  # the gradient of this rank's block
        behind: list[Shift] = []  # the gradient that follows the block now visited, on its way here

        def visit(owner: int, block: torch.Tensor) -> None:
            dk, dv = attend_backward(
                dout, q, spans[axis.rank], block[0], block[1], spans[owner], out, lse, dq, mask, scale, backend, softcap
            )
            if owner == axis.rank:  # stays at home; what the others add comes with the last message
                home[0], home[1] = dk, dv
                return
            part = torch.stack((dk, dv))
            if behind:
                part += behind.pop().wait()
            behind.append(Shift(part, axis, tag=1))

        circulate(kv, axis, visit)
        if behind:
            home += behind.pop().wait()
        dsink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return dq.to(q.dtype), home[0].to(q.dtype), home[1].to(q.dtype), dsink, *[None] * 6


# ------------------------------------------------------------------------------------------------- all-gather


class _AllGatherAttention(torch.autograd.Function):
    """As `_RingAttention`, with every rank's K and V gathered first, and gathered again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        mask: AttentionMask,
        axis: Axis,
        spans: list[Spans],
        scale: float,
        backend: str,
        softcap: float | None,
    ) -> torch.Tensor:
        kv, joined = torch.stack((k, v)), Joined(q)
        (k, v), everywhere = _in_order(c.all_gather(kv[None], axis), spans)
        attend(joined, q, spans[axis.rank], k, v, everywhere, mask, scale, backend, softcap)
        if sink is not None:
            joined.add_sink(sink)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, joined.lse, sink)
        ctx.rest = mask, axis, spans, scale, backend, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, kv, out, lse, sink = ctx.saved_tensors
        mask, axis, spans, scale, backend, softcap = ctx.rest
        (k, v), everywhere = _in_order(c.all_gather(kv[None], axis), spans)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        dout = grads[0].contiguous()
        dkv = torch.stack(
            attend_backward(dout, q, spans[axis.rank], k, v, everywhere, out, lse, dq, mask, scale, backend, softcap)
        )
        for_owners = torch.stack([torch.cat([dkv[..., a:b, :] for a, b in block_spans], -2) for block_spans in spans])
        dk, dv = c.reduce_scatter(for_owners, axis)[0]
        dsink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsink, *[None] * 6


def _in_order(blocks: torch.Tensor, spans: list[Spans]) -> tuple[torch.Tensor, Spans]:
    """[C, 2, b, g, n, d] in rank order -> [2, b, g, s, d] in the order of the sequence, and its span."""
    pieces = {}
    for block, block_spans in zip(blocks, spans, strict=True):
        for (start, _), piece in zip(block_spans, block.split([b - a for a, b in block_spans], -2), strict=True):
            pieces[start] = piece
    whole = torch.cat([pieces[start] for start in sorted(pieces)], -2)
    return whole, ((0, whole.shape[-2]),)
