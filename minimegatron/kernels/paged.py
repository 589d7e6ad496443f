"""Attention of new tokens to keys and values in pages, by torch's operations.

The problem in a sentence: torch's function wants the keys of a sequence in one piece, and they lie in pages.

So the pages of a sequence are copied side by side, and the function does the rest: all sequences with one new token in
one call, padded to the longest and under a mask; every other sequence, a prompt or a chunk of one, in its own call. A
kernel reads pages where they lie (`on_a_cpu`); this is what it is compared with, and what computes where there is none.

| tensor               | shape                                                                    |
|----------------------|--------------------------------------------------------------------------|
| q, the result        | [n, a, d], [n, a, d_v]: the new tokens of all sequences in one row       |
| key and value pages  | [pages, page size, g, d], [pages, page size, g, d_v]; each a/g heads share one |

`Paged` is the part of `layers/inference_context.InferenceContext` that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from minimegatron.kernels import operators


class Paged(Protocol):
    """Where the tokens of each sequence are; see `layers/inference_context.InferenceContext`."""

    @property
    def starts(self) -> torch.Tensor: ...

    @property
    def lengths(self) -> torch.Tensor: ...

    @property
    def page_table(self) -> torch.Tensor: ...

    @property
    def new(self) -> tuple[int, ...]: ...

    @property
    def totals(self) -> tuple[int, ...] | None: ...

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once a pass."""
        ...


def paged_attention(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[n, a, d] -> [n, a, d_v]; see `ops.paged_attention`."""
    new = context.new
    if all(count == 1 for count in new):
        return _one_token_each(q, key_pages, value_pages, context, None, scale, window, softcap)
    out = q.new_empty((*q.shape[:2], value_pages.shape[-1]))
    single = [i for i, count in enumerate(new) if count == 1]
    if single:
        sequences = context.once("single", lambda: torch.tensor(single, device=q.device))
        rows = context.starts[sequences].long()
        out[rows] = _one_token_each(q[rows], key_pages, value_pages, context, sequences, scale, window, softcap)
    assert context.totals is not None, "a recording has one new token of each sequence"
    _chunks(q, key_pages, value_pages, context, scale, window, softcap, out, 1)
    return out


def _chunks(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    longer_than: int,
) -> None:
    """Write into `out` the rows of sequences with more new tokens than that."""
    size, begin = key_pages.shape[1], 0
    for count, total, table in zip(context.new, context.totals or (), context.page_table, strict=True):
        end = begin + count
        if count > longer_than:
            k, v = (kept[table[: -(-total // size)]].flatten(0, 1)[:total] for kept in (key_pages, value_pages))
            out[begin:end] = _a_chunk(q[begin:end], k, v, scale, window, softcap)
        begin = end


FEW = 8  # new tokens up to which a pass over pages is cheaper than a copy of them


def on_a_cpu(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The same by `csrc/paged_attention.cpp`, for sequences with at most `FEW` new tokens; longer chunks by torch."""
    if key_pages.stride(-1) != 1 or value_pages.stride(-1) != 1:
        return paged_attention(q, key_pages, value_pages, context, scale, window, softcap)
    arguments = (context.starts, context.lengths, context.page_table, scale, window or 0, softcap or 0.0)
    out = _launch(q, key_pages, value_pages, *arguments)
    if max(context.new) > FEW:
        assert context.totals is not None, "a recording has one new token of each sequence"
        _chunks(q, key_pages, value_pages, context, scale, window, softcap, out, FEW)
    return out


def _launch(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    q, page_table = q.contiguous(), page_table.contiguous()
    out = q.new_empty((*q.shape[:2], value_pages.shape[-1]))
    strides = [torch.tensor(kept.stride()[:3]) for kept in (key_pages, value_pages)]
    sizes = (len(lengths), page_table.shape[1], FEW, key_pages.shape[1], q.shape[1], key_pages.shape[2], q.shape[2])
    operators.library("paged_attention", "cpu").call(
        "mm_paged_attention",
        *(q, key_pages, value_pages, out, starts, lengths, page_table, *strides, *sizes, out.shape[-1]),
        *(scale, window, softcap, operators.DTYPES[q.dtype]),
    )
    return out


def _one_token_each(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    sequences: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """q [r', a, d] of the sequences that are named, or of all, -> [r', a, d_v]."""
    size, groups = key_pages.shape[1:3]

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table, lengths = context.page_table, context.lengths
        if sequences is not None:
            table, lengths = table[sequences], lengths[sequences]
        if context.totals is not None:
            longest = max(total for total, count in zip(context.totals, context.new, strict=True) if count == 1)
            table = table[:, : -(-longest // size)]
        places = torch.arange(table.shape[1] * size, device=q.device)
        behind = places >= lengths[:, None]
        hidden = behind if window is None else behind | (places < lengths[:, None] - window)
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        return table, behind[..., None, None], bias[:, None, None]

    table, behind, bias = context.once(("one token", window, q.dtype, sequences is None), make)
    # What lies behind a sequence weighs 0, but 0 times what an overflow of somebody else has left there is no 0.
    k, v = (kept[table].flatten(1, 2).masked_fill_(behind, 0.0) for kept in (key_pages, value_pages))
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [r', g, m, d]
    q = q.unflatten(1, (groups, -1))  # the query heads of a group as rows of one head: no key is copied for them
    return _attend(q, k, v, bias, scale, softcap).flatten(1, 2)


def _a_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """The last n tokens of a sequence: q [n, a, d], k and v [m, g, d] of all m tokens -> [n, a, d_v]."""
    n, m = len(q), len(k)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    if n == m and softcap is None and (window is None or window >= m):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
        return out[0].transpose(0, 1)
    distance = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    if shared:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return _attend(q, k, v, bias, scale, softcap)[0].transpose(0, 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Attention of [b, heads, n, d] to [b, heads, m, d] under a bias; with a cap on scores by the formula."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    scores = softcap * torch.tanh(scores / softcap) + bias
    return scores.softmax(-1).to(q.dtype) @ v
