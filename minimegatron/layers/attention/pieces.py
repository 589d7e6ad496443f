"""Attention in pieces: over some of the keys at a time, joined exactly by log-sum-exp.

The problem in a sentence: softmax divides by a sum over all keys, and only some of them are here.

Attention over some of the keys gives `out_i`, normalised by the sum `exp(lse_i)` over *those* keys. Two pieces are
joined exactly by weighting each with its share of the whole sum, in fp32::

    l_new = log(exp(l) + exp(lse_i))
    O     = exp(l - l_new) O + exp(lse_i - l_new) out_i            begin with l = -inf, O = 0

The backward pass joins nothing: given the final `lse` and `D = rowsum(dout * out)`, the gradient is a plain sum over
pieces (`kernels/blockwise`), added up in fp32 too, so rounding does not grow with their number.

A sink (gpt-oss) is one more key, of the score z_h that head h learns, whose value is 0. Joined after the last piece, it
changes `lse` and `O` and nothing in the backward pass, which has both; dz = -sum exp(z - lse) D over the queries here.

Queries and keys come with their positions in the whole sequence (`Spans`). The mask cuts them into rectangles
(`mask.tiles`), and each goes to the fastest code that returns the lse:

| rectangle          | computed by                                                                                  |
|--------------------|----------------------------------------------------------------------------------------------|
| `FULL`, `DIAGONAL` | aten's `scaled_dot_product_flash_attention`: that of the CPU, or of a GPU in 16 bits; with   |
|                    | the backend `auto` on a CPU the package's kernel                                             |
| `PARTIAL`          | blockwise, `kernels/blockwise`; with the backend `local` everything                          |

Nothing here knows a rank: `layers/attention/context_parallel` brings the pieces. Milakov, Gimelshein 2018 (arXiv
1805.02867) for the running softmax; Liu et al. 2023 (arXiv 2310.01889). Transformer Engine:
`flash_attn_fwd_out_correction` in `dot_product_attention/context_parallel.py`.
"""

from __future__ import annotations

import torch

from minimegatron.comm.sequence import Spans
from minimegatron.kernels import flash, ops
from minimegatron.kernels.blockwise import BLOCK, flash_backward, flash_forward
from minimegatron.layers.attention.mask import DIAGONAL, FULL, PARTIAL, AttentionMask, Tile

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_RULE = {FULL: AttentionMask(causal=False), DIAGONAL: AttentionMask()}


class Joined:
    """The pieces of attention joined so far.

    Attributes:
        out: [b, a, n, d], and
        lse: [b, a, n], both in fp32 (fp64).
    """

    def __init__(self, q: torch.Tensor) -> None:
        acc = torch.promote_types(q.dtype, torch.float32)
        b, a, n, d = q.shape  # in memory by tokens, as the next layer reads it: a copy for it would be kept as well
        self.out = torch.zeros((n, b, a, d), dtype=acc, device=q.device).permute(1, 2, 0, 3)
        self.lse = torch.full(q.shape[:3], -torch.inf, dtype=acc, device=q.device)
        self._empty = True

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Join a piece that covers these rows."""
        if self._empty and out.shape == self.out.shape:  # the usual first piece: nothing to weigh it against
            self.out, self.lse, self._empty = out.to(self.out.dtype), lse.to(self.lse.dtype), False
            return
        self._empty = False
        before, now = self.lse[:, :, rows], lse.to(self.lse.dtype)
        total = torch.logaddexp(before, now)
        finite = total.masked_fill(total == -torch.inf, 0.0)  # rows that have seen nothing yet stay 0
        old, new = (torch.exp(x - finite).unsqueeze(-1) for x in (before, now))
        self.out[:, :, rows] = self.out[:, :, rows] * old + out.to(self.out.dtype) * new
        self.lse[:, :, rows] = total

    def add_sink(self, sink: torch.Tensor) -> None:
        """Join, once for all pieces, one more key: its scores are `sink` [a], its value is 0."""
        total = torch.logaddexp(self.lse, sink.to(self.lse.dtype)[:, None])
        self.out, self.lse = self.out * torch.exp(self.lse - total).unsqueeze(-1), total


def sink_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The gradient of `sink` [a] by these queries; arguments as of `attend_backward`, `lse` with the sink."""
    share = torch.exp(sink.to(lse.dtype)[:, None] - lse)  # dS = p (dp - D), and dp = dout . 0
    return -(share * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sink.dtype)


def attend(
    joined: Joined,
    q: torch.Tensor,
    q_spans: Spans,
    k: torch.Tensor,
    v: torch.Tensor,
    k_spans: Spans,
    mask: AttentionMask,
    scale: float,
    backend: str,
    softcap: float | None = None,
) -> None:
    """Join the attention of these queries over these keys.

    Args:
        joined: receives the result.
        q: [b, a, n, d], n tokens at the positions `q_spans`.
        k, v: [b, g, m, d], m tokens at the positions `k_spans`.
        mask: which query sees which key.
        scale: factor of the scores.
        backend: `auto`, `sdpa`, `local` or `reference`.
        softcap: cap of the scores (`kernels/blockwise.flash_forward`); `auto` and `sdpa` have none.
    """
    for tile in mask.tiles(q_spans, k_spans):
        rows, cols = slice(*tile.rows), slice(*tile.cols)
        out, lse = _forward(q[:, :, rows], k[:, :, cols], v[:, :, cols], tile, mask, scale, backend, softcap)
        joined.add(rows, out, lse)


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    q_spans: Spans,
    k: torch.Tensor,
    v: torch.Tensor,
    k_spans: Spans,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    mask: AttentionMask,
    scale: float,
    backend: str,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add this piece's part of dq to `dq`; return its dk and dv, [b, g, m, d] in fp32 (fp64).

    Args:
        dout, out, lse: those of the queries' whole attention.
        dq: [b, a, n, d] in fp32 (fp64).
    """
    tiles = mask.tiles(q_spans, k_spans)
    whole = len(tiles) == 1 and tiles[0].cols == (0, k.shape[2])
    dk, dv = (torch.zeros((0,) if whole else t.shape, dtype=dq.dtype, device=t.device) for t in (k, v))
    for tile in tiles:
        rows, cols = slice(*tile.rows), slice(*tile.cols)
        of_rows = (dout[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows])
        grads = _backward(*of_rows, k[:, :, cols], v[:, :, cols], tile, mask, scale, backend, softcap)
        dq[:, :, rows] += grads[0]
        if whole:  # one rectangle over all keys: nothing to add up
            return grads[1].to(dq.dtype), grads[2].to(dq.dtype)
        dk[:, :, cols] += grads[1]
        dv[:, :, cols] += grads[2]
    return dk, dv


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: Tile,
    mask: AttentionMask,
    scale: float,
    backend: str,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _aten_applies(q, tile, backend):
        rule = mask if tile.relation == PARTIAL else _RULE[tile.relation]
        return flash_forward(q, k, v, rule, scale, tile.q_start, tile.k_start, _block(q, k, backend), softcap)
    causal = tile.relation == DIAGONAL
    if backend == "auto" and ops.attends_on_a_cpu(q, v):
        return flash.flash_attention(q, k, v, scale, causal, True)  # type: ignore[no-any-return]
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    k, v = (_expand(t, q.shape[1]) for t in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: Tile,
    mask: AttentionMask,
    scale: float,
    backend: str,
    softcap: float | None,
) -> Triple:
    if not _aten_applies(q, tile, backend):
        rule = mask if tile.relation == PARTIAL else _RULE[tile.relation]
        block = _block(q, k, backend)
        return flash_backward(dout, q, k, v, out, lse, rule, scale, tile.q_start, tile.k_start, block, softcap)
    causal = tile.relation == DIAGONAL
    if backend == "auto" and ops.attends_on_a_cpu(q, v):
        return flash.attention_backward(dout, q, k, v, out, lse, scale, causal, True)  # type: ignore[no-any-return]
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    g, a, n, m = k.shape[1], q.shape[1], q.shape[2], k.shape[2]
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state: there is no dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        _expand(k, a),
        _expand(v, a),
        out,
        lse.contiguous(),  # the kernel reads it as one piece of memory
        None,
        None,
        n,
        m,
        0.0,
        causal,
        unused,
        unused,
        scale=scale,
    )
    return dq, _fold(dk, g), _fold(dv, g)


def _aten_applies(q: torch.Tensor, tile: Tile, backend: str) -> bool:
    if backend not in ("auto", "sdpa") or tile.relation == PARTIAL:
        return False
    return q.device.type == "cpu" or (q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0)


def _block(q: torch.Tensor, k: torch.Tensor, backend: str) -> int:
    return max(q.shape[2], k.shape[2]) if backend == "reference" else BLOCK


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, g, m, d] -> [b, heads, m, d]: a copy of a group's head for each of its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _fold(x: torch.Tensor, g: int) -> torch.Tensor:
    """[b, heads, m, d] -> [b, g, m, d] in fp32: the gradient of `_expand`."""
    return x.float().unflatten(1, (g, -1)).sum(2)
