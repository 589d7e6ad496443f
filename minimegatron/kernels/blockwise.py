"""Attention without the s x s matrix: blocks of keys, a running maximum, a running sum.

The problem in a sentence: softmax needs the whole row of scores before it can divide, and the rows of all queries are
s^2 numbers, which do not fit and are slow to move.

A row's softmax can be computed block by block, if the accumulated sums are rescaled whenever the maximum grows. For a
block of queries, and for each block of keys and values in turn (scale sigma = 1/sqrt(d))::

    S  = sigma Q K^T                         [B, B]
    m' = max(m, rowmax S)                    the running maximum
    P  = exp(S - m')                         at most 1, so nothing overflows
    l  = l exp(m - m') + rowsum P            the running denominator
    O  = O exp(m - m') + P V                 the running numerator
                                at the end:  out = O / l,   lse = m + log l

The backward pass computes P again from one number a row, `P = exp(S - lse)`, and needs of the output only
`D = rowsum(dout * out)`, because softmax's gradient is `dS = P (dP - D)`::

    dV += P^T dout,    dP = dout V^T,    dS = P (dP - D) sigma,    dQ += dS K,    dK += dS^T Q

| kept for the backward pass | shape            | instead of            |
|----------------------------|------------------|-----------------------|
| q, out                     | [b, a, s, d]     |                       |
| k, v                       | [b, g, s, d]     |                       |
| lse                        | [b, a, s]        | P, [b, a, s, s]       |

The price is the second QK^T: 7 matrix products instead of 6. Blocks in which nothing is visible are skipped, so a
causal mask halves the work and a window makes it linear. Grouped queries need no copies of K and V: the a/g query heads
of a group are rows of one product. Everything inside is in fp32 (fp64 for fp64 inputs).

With `lse`, attention over several pieces of the keys can be joined (`layers/attention/pieces.py`); ring attention does.

Dao et al. 2022 (arXiv 2205.14135), Dao 2023 (arXiv 2307.08691); Milakov, Gimelshein 2018 (arXiv 1805.02867) for the
online softmax. Megatron-LM calls the flash-attn package or Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

Span = tuple[int, int]
NONE, FULL = "none", "full"  # how queries of a block see its keys: not at all, all of them; else a table says it
BLOCK = 128


class Visibility(Protocol):
    """Which query sees which key (`layers/attention/mask.AttentionMask`): the part that blockwise attention needs."""

    def relation(self, q: Span, k: Span) -> str:
        """How the queries [a, b) see the keys [c, d), both given as positions in the sequence."""
        ...

    def table(self, q: Span, k: Span, device: torch.device | None = None) -> torch.Tensor:
        """[b or 1, 1, b - a, d - c] bool, True where the query (row) sees the key (column)."""
        ...


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Visibility,
    scale: float,
    q_start: int = 0,
    k_start: int = 0,
    block: int = BLOCK,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a piece of the queries over a piece of the keys.

    Args:
        q: [b, a, n, d].
        k, v: [b, g, m, d]; g divides a.
        mask: which query sees which key.
        scale: sigma.
        q_start, k_start: positions in the sequence of the first query and the first key.
        block: rows and columns of a block; it only affects rounding.
        softcap: c, if a score x becomes c tanh(x / c); None for no cap.

    Returns:
        out [b, a, n, d] and lse [b, a, n], in fp32 (fp64); a query that sees nothing has out 0 and lse -inf.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=acc, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=acc, device=q.device)
    g = k.shape[1]
    for rows in _blocks(q.shape[2], block):
        qb = _grouped(q[:, :, slice(*rows)], g, acc) * scale
        top = qb.new_full((*qb.shape[:3], 1), -torch.inf)
        total, o = torch.zeros_like(top), torch.zeros_like(qb)
        for cols in _blocks(k.shape[2], block):
            s = _scores(qb, k, rows, cols, mask, q_start, k_start, softcap)
            if s is None:
                continue
            higher = torch.maximum(top, s.amax(-1, keepdim=True))
            finite = higher.masked_fill(higher == -torch.inf, 0.0)  # rows that have seen nothing yet
            p, shrink = torch.exp(s - finite), torch.exp(top - finite)
            total = total * shrink + p.sum(-1, keepdim=True)
            o = o * shrink + p @ v[:, :, slice(*cols)].to(acc)
            top = higher
        out[:, :, slice(*rows)] = _ungrouped(o / total.masked_fill(total == 0.0, 1.0), rows)
        lse[:, :, slice(*rows)] = _ungrouped(top + total.log(), rows).squeeze(-1)
    return out, lse


def flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Visibility,
    scale: float,
    q_start: int = 0,
    k_start: int = 0,
    block: int = BLOCK,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this piece of the attention.

    Args:
        dout, out: [b, a, n, d], and
        lse: [b, a, n]: those of the *whole* attention of these queries, of which the keys may be only a part.

    The other arguments are those of `flash_forward`.

    Returns:
        dq, dk, dv in fp32 (fp64), shaped like q, k, v: this piece's terms of the sums.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    g = k.shape[1]
    dq, dk, dv = (torch.zeros(t.shape, dtype=acc, device=t.device) for t in (q, k, v))
    delta = (dout.to(acc) * out.to(acc)).sum(-1, keepdim=True)
    lse = lse.to(acc).masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)  # exp(S - inf) = 0: they saw nothing
    for rows in _blocks(q.shape[2], block):
        here = slice(*rows)
        qb, do, of_row, d_row = (_grouped(t[:, :, here], g, acc) for t in (q, dout, lse, delta))
        dqb = torch.zeros_like(qb)
        for cols in _blocks(k.shape[2], block):
            s = _scores(qb * scale, k, rows, cols, mask, q_start, k_start, softcap)
            if s is None:
                continue
            there = slice(*cols)
            kb, vb = k[:, :, there].to(acc), v[:, :, there].to(acc)
            p = torch.exp(s - of_row)
            ds = p * (do @ vb.mT - d_row) * scale
            if softcap is not None:  # d tanh(x) = 1 - tanh(x)^2; where nothing is visible p is 0
                ds = ds * (1.0 - (s / softcap).clamp(min=-1.0).square())
            dv[:, :, there] += p.mT @ do
            dk[:, :, there] += ds.mT @ qb
            dqb += ds @ kb
        dq[:, :, here] = _ungrouped(dqb, rows)
    return dq, dk, dv


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Visibility,
        scale: float,
        block: int,
        softcap: float | None,
    ) -> torch.Tensor:
        out, lse = flash_forward(q, k, v, mask, scale, block=block, softcap=softcap)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale, ctx.rest = mask, scale, {"block": block, "softcap": softcap}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = flash_backward(grads[0], q, k, v, out, lse, ctx.mask, ctx.scale, **ctx.rest)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Visibility,
    scale: float,
    block: int = BLOCK,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [b, a, s, d], k and v [b, g, s, d] -> [b, a, s, d]; no tensor of s x s, forward or backward."""
    return _FlashAttention.apply(q, k, v, mask, scale, block, softcap)  # type: ignore[no-any-return]


def _blocks(n: int, block: int) -> Iterator[Span]:
    return ((start, min(start + block, n)) for start in range(0, n, block))


def _grouped(x: torch.Tensor, g: int, dtype: torch.dtype) -> torch.Tensor:
    """[b, a, n, .] -> [b, g, a/g * n, .]: the heads of a group become rows of one product."""
    return x.to(dtype).unflatten(1, (g, -1)).flatten(2, 3)


def _ungrouped(x: torch.Tensor, rows: Span) -> torch.Tensor:
    """[b, g, a/g * n, .] -> [b, a, n, .]"""
    return x.unflatten(2, (-1, rows[1] - rows[0])).flatten(1, 2)


def _scores(
    qb: torch.Tensor,
    k: torch.Tensor,
    rows: Span,
    cols: Span,
    mask: Visibility,
    q_start: int,
    k_start: int,
    softcap: float | None,
) -> torch.Tensor | None:
    """Scores of a block, capped, -inf where invisible, [b, g, a/g * rows, cols]; None if all are invisible."""
    q_span, k_span = (q_start + rows[0], q_start + rows[1]), (k_start + cols[0], k_start + cols[1])
    relation = mask.relation(q_span, k_span)
    if relation == NONE:
        return None
    s = qb @ k[:, :, slice(*cols)].to(qb.dtype).mT
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if relation != FULL:
        hidden = ~mask.table(q_span, k_span, qb.device).unsqueeze(2)  # [b or 1, 1, 1, rows, cols]
        s = s.unflatten(2, (-1, rows[1] - rows[0])).masked_fill(hidden, -torch.inf).flatten(2, 3)
    return s
