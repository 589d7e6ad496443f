"""Mamba-2 within chunks of tokens. Kernel: `csrc/chunk_scan.cu`; the formula: `reference.chunk_scan`.

| computed             | by                             | kept for the backward pass                               |
|----------------------|--------------------------------|----------------------------------------------------------|
| y                    | `mm_chunk_scan`                | scores, logs, x and y: no array of [l, l] a head         |
| dx                   | the same, weights transposed   |                                                          |
| gradient of scores   | `mm_chunk_scan_scores`         |                                                          |
| gradient of logs     | dy_i . y_i - x_i . dx_i        |                                                          |

In fp32 or fp64, as the layer computes: decays multiply up over a sequence. Raises `ConfigError` on wrong shapes or
mixed dtypes. Dao and Gu 2024 (arXiv 2405.21060), section 6.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels.operators import DTYPES, check_same, check_shape, like, operator, run

Tensor = torch.Tensor


def _sizes(x: Tensor, scores: Tensor) -> tuple[int, int, int, int, int]:
    """m, l, heads, groups, p."""
    m, length, heads, p = x.shape
    return m, length, heads, scores.shape[1], p


def _output(scores: Tensor, logs: Tensor, x: Tensor, documents: Tensor | None = None) -> Tensor:
    wide = (torch.float32, torch.float64)
    fits = x.dim() == 4 and scores.dim() == 4 and scores.shape[1] > 0 and x.shape[2] % scores.shape[1] == 0
    require(
        fits and x.dtype in wide,
        f"chunk_scan: x {x.dtype} {tuple(x.shape)}, scores {tuple(scores.shape)}",
        "give x [m, l, heads, p] in fp32 or fp64, and scores [m, groups, l, l] whose groups divide the heads",
    )
    m, length, heads, groups, _ = _sizes(x, scores)
    check_same("chunk_scan", x, scores=scores, logs=logs)
    check_shape(
        "chunk_scan",
        scores=(scores, (m, groups, length, length)),
        logs=(logs, (m, heads, length)),
        documents=(documents, (m, length)),
    )
    require(
        documents is None or documents.dtype == torch.int64,
        f"chunk_scan: documents are {None if documents is None else documents.dtype}",
        "give int64",
    )
    return like(x)


def _weighted(scores: Tensor, logs: Tensor, x: Tensor, documents: Tensor | None, back: bool) -> Tensor:
    out = _output(scores, logs, x, documents)
    if out.numel():
        documents = None if documents is None else documents.contiguous()
        scores, logs, x = (t.contiguous() for t in (scores, logs, x))
        args = (scores, logs, x, documents, out, *_sizes(x, scores), int(back), DTYPES[x.dtype])
        run("chunk_scan", "mm_chunk_scan", x, *args)
    return out


@operator("chunk_scan_backward", lambda dy, scores, logs, x, documents: (like(scores), like(x)))
def _backward(dy: Tensor, scores: Tensor, logs: Tensor, x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gradient of scores, dx)"""
    check_same("chunk_scan_backward", x, dy=dy)
    dx, dscores = _weighted(scores, logs, dy, documents, True), like(scores)
    if dscores.numel():
        documents = None if documents is None else documents.contiguous()
        dy, x, logs = (t.contiguous() for t in (dy, x, logs))
        args = (dy, x, logs, documents, dscores, *_sizes(x, scores), DTYPES[x.dtype])
        run("chunk_scan", "mm_chunk_scan_scores", x, *args)
    return dscores, dx


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output)


def _grads(ctx: Any, dy: Tensor) -> Any:
    scores, logs, x, documents, y = ctx.saved_tensors
    dscores, dx = _backward(dy, scores, logs, x, documents)
    dlogs = (dy * y).sum(-1) - (x * dx).sum(-1)
    return dscores, dlogs.transpose(1, 2), dx, None


@operator("chunk_scan", _output, keep=_keep, grads=_grads)
def chunk_scan(scores: Tensor, logs: Tensor, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """y_i = sum over j <= i of exp(logs_i - logs_j) scores_ij x_j, in each chunk.

    Args:
        scores: [m, groups, l, l], C B^T; what is above the diagonal is not read.
        logs: [m, heads, l], sums of the logarithms of decays since the chunk's first token.
        x: [m, l, heads, p].
        documents: int64 [m, l]; tokens of different ones do not see each other.
    """
    return _weighted(scores, logs, x, documents, False)
