"""Paged attention: new tokens attend to keys and values of their sequence that lie in pages.

The problem in a sentence: torch's `scaled_dot_product_attention` needs the keys of a sequence contiguous, and a paged
cache scatters them.

| implementation    | reads pages in place        | computes                                                          |
|-------------------|-----------------------------|-------------------------------------------------------------------|
| `paged_attention` | no: gathers them, then SDPA | anything: one call for all sequences with one new token, padded   |
|                   |                             | and masked, and one call for each other sequence                  |
| `by_a_kernel`     | yes, `paged_attention.cu`   | sequences with at most `FEW` new tokens, on a GPU; others by SDPA |
| `on_a_cpu`        | yes, `paged_attention.cpp`  | the same, on a CPU                                                |
| `by_flash_attn`   | yes                         | one new token a sequence, where flash-attn is installed           |

| tensor               | shape                                                                             |
|----------------------|-----------------------------------------------------------------------------------|
| q, the result        | [n, a, d], [n, a, d_v]: the new tokens of all sequences in one row                |
| key and value pages  | [pages, page size, g, d], [pages, page size, g, d_v]; a/g query heads share a key |

Kwon et al. 2023 (arXiv 2309.06180), section 4.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from minimegatron.kernels import operators


class Paged(Protocol):
    """Where the tokens of each sequence are: the part of `layers/inference_context.InferenceContext` used here."""

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
        """The result of `make`, computed once a forward pass."""
        ...


class Scores(NamedTuple):
    """What makes weights of products of queries and keys; see `ops.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: torch.Tensor | None = None


def paged_attention(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scores: Scores,
) -> torch.Tensor:
    """By torch: [n, a, d] -> [n, a, d_v]; see `ops.paged_attention`."""
    new = context.new
    if all(count == 1 for count in new):
        return _one_token_each(q, key_pages, value_pages, context, None, scores)
    out = q.new_empty((*q.shape[:2], value_pages.shape[-1]))
    single = [i for i, count in enumerate(new) if count == 1]
    if single:
        sequences = context.once("single", lambda: torch.tensor(single, device=q.device))
        rows = context.starts[sequences].long()
        out[rows] = _one_token_each(q[rows], key_pages, value_pages, context, sequences, scores)
    assert context.totals is not None, "a recording has one new token of each sequence"
    _chunks(q, key_pages, value_pages, context, scores, out, 1)
    return out


def _chunks(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scores: Scores,
    out: torch.Tensor,
    longer_than: int,
) -> None:
    """Compute the sequences with more than `longer_than` new tokens, each by its own call, into `out`."""
    size, begin = key_pages.shape[1], 0
    for count, total, table in zip(context.new, context.totals or (), context.page_table, strict=True):
        end = begin + count
        if count > longer_than:
            k, v = (kept[table[: -(-total // size)]].flatten(0, 1)[:total] for kept in (key_pages, value_pages))
            out[begin:end] = _a_chunk(q[begin:end], k, v, scores)
        begin = end


FEW = 8  # new tokens of a sequence up to which reading pages in place is cheaper than gathering them


def on_a_cpu(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scores: Scores,
) -> torch.Tensor:
    """By `csrc/paged_attention.cpp`; see `ops.paged_attention`."""
    return _by(_launch, True, q, key_pages, value_pages, context, scores)


def by_a_kernel(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scores: Scores,
) -> torch.Tensor:
    """By `csrc/paged_attention.cu`; see `ops.paged_attention`."""
    fits = q.shape[-1] <= MAX_KEY and value_pages.shape[-1] <= MAX_VALUE
    return _by(_kernel, fits, q, key_pages, value_pages, context, scores)


def _by(
    kernel: Callable[..., torch.Tensor],
    fits: bool,
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scores: Scores,
) -> torch.Tensor:
    """By a kernel where sequences have at most `FEW` new tokens; longer chunks, and shapes it lacks, by torch."""
    if not fits or key_pages.stride(-1) != 1 or value_pages.stride(-1) != 1:
        return paged_attention(q, key_pages, value_pages, context, scores)
    new = context.new
    few, longest = context.once("few", lambda: (max(sum(count for count in new if count <= FEW), 1), max(new)))
    where = context.starts, context.lengths, context.page_table
    sink = None if scores.sink is None else scores.sink.to(q.dtype)
    out = kernel(q, key_pages, value_pages, *where, scores.scale, scores.window or 0, scores.softcap or 0.0, sink, few)
    if longest > FEW:
        assert context.totals is not None, "a recording has one new token of each sequence"
        _chunks(q, key_pages, value_pages, context, scores, out, FEW)
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
    sink: torch.Tensor | None,
    few: int,
) -> torch.Tensor:
    """Call the CPU kernel: threads split the sequences, and the head groups where there are few sequences."""
    q, page_table = q.contiguous(), page_table.contiguous()
    out = _outputs(q, key_pages, value_pages)
    strides = (*key_pages.stride()[:3], *value_pages.stride()[:3])
    sizes = (len(lengths), page_table.shape[1], FEW, key_pages.shape[1], q.shape[1], key_pages.shape[2], q.shape[2])
    operators.library("paged_attention", "cpu").call(
        "mm_paged_attention",
        *(q, key_pages, value_pages, out, starts, lengths, page_table, *strides, *sizes, out.shape[-1]),
        *(scale, window, softcap, sink, operators.DTYPES[q.dtype]),
    )
    return out


def keep_tokens(tokens: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """By torch; see `ops.keep_tokens`."""
    size = pages.shape[1]
    pages.index_put_((rows // size, rows % size), tokens)


def keep_on_a_cpu(tokens: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """By `csrc/paged_attention.cpp`; see `ops.keep_tokens`."""
    if tokens.dim() != 3 or tokens.stride(-1) != 1 or pages.stride(-1) != 1:
        return keep_tokens(tokens, pages, rows)
    (n, heads, d), size = tokens.shape, tokens.itemsize
    strides = (stride * size for stride in (*tokens.stride()[:2], *pages.stride()[:3]))
    operators.library("paged_attention", "cpu").call(
        "mm_keep_tokens", tokens, pages, rows, n, pages.shape[1], heads, d * size, *strides
    )


def _outputs(q: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], value_pages.shape[-1]))


MAX_KEY, MAX_VALUE = 640, 512  # most channels of a head in `csrc/paged_attention.cu`
RANGE = 32  # a block of it computes a multiple of so many keys


FLASH_PAGE, FLASH_HEAD = 256, 256  # flash-attn 2: page size is a multiple of 256, a head has at most 256 channels


@functools.cache
def _flash_attn() -> Callable[..., torch.Tensor] | None:
    """flash-attn's function for a paged cache; None where the package is not installed."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_with_kvcache  # type: ignore[no-any-return]


def fits_flash_attn(q: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, context: Paged) -> bool:
    """Whether flash-attn can compute this: one new token a sequence, 16 bits on a GPU, pages of a multiple of 256."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == key_pages.dtype
        and key_pages.shape == value_pages.shape
        and key_pages.shape[1] % FLASH_PAGE == 0
        and q.shape[-1] <= FLASH_HEAD
        and q.shape[-1] % 8 == 0
        and len(q) == len(context.new)
        and max(context.new) == 1
        and _flash_attn() is not None
    )


def by_flash_attn(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    scores: Scores,
) -> torch.Tensor:
    """By the package flash-attn, where `fits_flash_attn`; see `ops.paged_attention`."""
    attend = _flash_attn()
    assert attend is not None, "fits_flash_attn has asked for it"
    out = attend(
        q.unsqueeze(1),
        key_pages,
        value_pages,
        cache_seqlens=context.lengths,
        block_table=context.page_table.contiguous(),
        softmax_scale=scores.scale,
        causal=True,
        window_size=(-1, -1) if scores.window is None else (scores.window - 1, 0),
        softcap=scores.softcap or 0.0,
    )
    return out.squeeze(1)


@operators.operator("paged_attention", _outputs)
def _kernel(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sink: torch.Tensor | None,
    few: int,
) -> torch.Tensor:
    """Call the CUDA kernel. It computes `few` tokens: the fewer they are, the more blocks split the keys of each."""
    q, page_table = q.contiguous(), page_table.contiguous()
    out = _outputs(q, key_pages, value_pages)
    (n, a, d), (_, size, g, dv) = q.shape, value_pages.shape
    longest = page_table.shape[1] * size
    # A block has up to 8 heads of a group; four blocks a multiprocessor hide the latency of memory.
    blocks = operators.parts_for(4 * longest, q.device, resident=4)
    splits = min(-(-blocks // (few * g * -(-a // g // 8))), -(-longest // (8 * RANGE)) if q.is_cuda else blocks)
    span = -(-longest // splits // RANGE) * RANGE
    wide = operators.accumulator(q.dtype)
    partial, stats = (q.new_empty((n, a, splits, x), dtype=wide) if splits > 1 else None for x in (dv, 2))
    operators.run(
        *("paged_attention", "mm_paged_attention", q, q, key_pages, value_pages, out, partial, stats),
        *(starts, lengths, page_table, n, len(lengths), page_table.shape[1], FEW, size, a, g, d, dv),
        *(*key_pages.stride()[:3], *value_pages.stride()[:3], scale, window, softcap, sink, splits, span),
        operators.DTYPES[q.dtype],
    )
    return out


def _one_token_each(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: Paged,
    sequences: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """q [r', a, d], one token of each of `sequences` (None: of all) -> [r', a, d_v], by one call of SDPA."""
    (size, groups), window = key_pages.shape[1:3], scores.window

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
    # Rows behind a sequence's last token have weight 0, but 0 times an old infinity or NaN in them is NaN.
    k, v = (kept[table].flatten(1, 2).masked_fill_(behind, 0.0) for kept in (key_pages, value_pages))
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [r', g, m, d]
    q = q.unflatten(1, (groups, -1))  # query heads of a group become rows of one head: keys need no repeat
    return _attend(q, k, v, bias, scores).flatten(1, 2)


def _a_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The last n tokens of a sequence: q [n, a, d], k and v [m, g, d] of all m tokens -> [n, a, d_v]."""
    n, m = len(q), len(k)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    shared, window = q.shape[1] != k.shape[1], scores.window
    if n == m and scores.softcap is None and scores.sink is None and (window is None or window >= m):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scores.scale, enable_gqa=shared)
        return out[0].transpose(0, 1)
    distance = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    if shared:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return _attend(q, k, v, bias, scores)[0].transpose(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Attention of [b, heads, n, d] to [b, heads, m, d] with an additive bias; with a softcap by the formula.

    Rows may be several query heads that share keys. A sink is one more key of zeros, whose bias it is.
    """
    scale, _, softcap, sink = scores
    if sink is not None:
        column = sink.to(bias.dtype).view(q.shape[1], -1, 1).expand(*q.shape[:3], 1)
        bias = torch.cat([bias.expand(*q.shape[:3], k.shape[2]), column], -1)
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
    products = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return (softcap * torch.tanh(products / softcap) + bias).softmax(-1).to(q.dtype) @ v
