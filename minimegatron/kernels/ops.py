"""Fused operations: what layers call. Each function is one operation with its contract; `kernels/choice` picks what
computes it on this machine.

A layer passes its tensors and `config.kernels`. Operations communicate nothing. Where ranks exchange a message in the
middle, the operation is an object with a method for each side of the message (`interfaces.CrossEntropyPart`) or two
functions (`fp8_magnitudes`, `fp8_cast_by`), and the layer sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minimegatron.kernels import blockwise, choice, few_rows, flash, laid_out, optimizer, paged
from minimegatron.kernels.choice import choose
from minimegatron.kernels.interfaces import CrossEntropyPart, Mask, Permutation
from minimegatron.kernels.quantized import Packed


def linear(x: torch.Tensor, weight: torch.Tensor | Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., i], weight [o, i] -> [..., o], without a gradient.

    Args:
        x: any number of rows.
        weight: packed (`quantized.Packed`), or a tensor: up to 3 rows are multiplied by a CPU kernel (`few_rows`), more
            by the weight's prepacked copy if it has one (`laid_out`).
        bias: [o].
    """
    if isinstance(weight, Packed):
        return weight.linear(x, bias, choice.in_inference("auto", "quantized", x))
    if few_rows.fits(x, weight) and choice.in_inference("auto", "few_rows", x, weight, bias):
        return few_rows.linear(x, weight, bias)
    return laid_out.linear(x, weight, bias)


# ------------------------------------------------------------------------------------------- norms, activations, rope


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, kernels: str = "auto"
) -> torch.Tensor:
    """[..., n] -> [..., n]: LayerNorm over the last dim, RMSNorm if `bias` is None; statistics in fp32."""
    return choose("norm", kernels, x, weight, bias)(x, weight, bias, eps)  # type: ignore[no-any-return]


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(h), h) of h = x + residual: by a kernel in one pass over memory. h may be wider than the weight."""
    add = choose("add_norm", kernels, x, residual, weight, bias)
    return add(x, residual, weight, bias, eps)  # type: ignore[no-any-return]


def activation(kind: str, x: torch.Tensor, *, kernels: str = "auto", **options: Any) -> torch.Tensor:
    """The activation of an MLP: one of `config.activation`.

    gelu, gelu_tanh, quick_gelu, relu, squared_relu and silu are elementwise; swiglu, geglu, geglu_tanh and quick_geglu
    halve the last dim: [..., 2 f] = [gate, up] -> act(gate) * up.

    Args:
        options: `offset` and `limit` of quick_geglu (`plain.quick_geglu`).
    """
    return choose(kind, kernels, x)(x, **options)  # type: ignore[no-any-return]


def swiglu(x: torch.Tensor, *, kernels: str = "auto") -> torch.Tensor:
    """[..., 2 f] = [gate, up] -> [..., f]: silu(gate) * up."""
    return activation("swiglu", x, kernels=kernels)


def bias_gelu(
    product: Callable[..., torch.Tensor], bias: torch.Tensor, approximate: bool = False, *, kernels: str = "auto"
) -> torch.Tensor:
    """gelu(product + bias).

    Args:
        product: computes a matrix product [..., f] with its bias, or with `add_bias=False` without: with torch the
            product adds it, at no cost; the kernel adds it itself.
        bias: [f].
        approximate: the tanh form.
    """
    return choose("bias_gelu", kernels, bias)(product, bias, approximate)  # type: ignore[no-any-return]


def chunk_scan(
    scores: torch.Tensor,
    logs: torch.Tensor,
    x: torch.Tensor,
    documents: torch.Tensor | None = None,
    *,
    kernels: str = "auto",
) -> torch.Tensor:
    """Mamba-2 within m chunks of l tokens: y_i = sum over j <= i of exp(logs_i - logs_j) scores_ij x_j.

    Args:
        scores: [m, groups, l, l].
        logs: [m, heads, l], sums of logarithms of decays.
        x: [m, l, heads, p]; all in fp32 or fp64.
        documents: int64 [m, l]; tokens of different ones do not see each other.
    """
    return choose("chunk_scan", kernels, scores, logs, x)(scores, logs, x, documents)  # type: ignore[no-any-return]


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, *, kernels: str = "auto"
) -> torch.Tensor:
    """Rotate the first `2 * cos.shape[-1]` channels of every head.

    Args:
        x: [s, b, heads, d].
        cos, sin: [s, b or 1, 1, rotated / 2]; kernels compute with them in fp32, torch in the dtype of x.
        interleaved: pairs (2i, 2i+1) instead of (i, i + rotated/2).
    """
    return choose("rope", kernels, x)(x, cos, sin, interleaved)  # type: ignore[no-any-return]


def heads(
    packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, *, kernels: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys after `rope`, and values, out of a packed projection; on a CPU in one pass.

    Args:
        packed: [s, b, g, a/g + 2, d], the queries, the key and the value of each group.
        cos, sin: [s, b or 1, 1, rotated / 2].
        interleaved: see `rope`.

    Returns:
        q [s, b, a, d], k and v [s, b, g, d].
    """
    return choose("heads", kernels, packed)(packed, cos, sin, interleaved)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- attention, the loss


def scaled_softmax(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None = None, causal: bool = False, *, kernels: str = "auto"
) -> torch.Tensor:
    """softmax(scale x) over the last dim of scores [b, a, q, k], in fp32.

    Args:
        mask: bool [b or 1, a or 1, q, k], True where a query does *not* see a key; one that sees nothing gets zeros.
        causal: query i sees keys j <= i + k - q.
    """
    return choose("scaled_softmax", kernels, x)(x, scale, mask, causal)  # type: ignore[no-any-return]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    *,
    kernels: str = "auto",
) -> torch.Tensor:
    """q [b, a, s, d], k and v [b, g, s, d] -> [b, a, s, d], without a matrix of s x s; see `kernels/blockwise.py`.

    Kernels support causal and full attention, of heads of at most 128 channels, without a cap on scores.
    """
    if softcap is not None:
        return blockwise.flash_attention(q, k, v, mask, scale, softcap=softcap)
    known = flash.fits(q, v) and mask.dense(q.shape[2], q.device) is None
    attend = choose("flash_attention", kernels if known else "torch", q, k, v)
    return attend(q, k, v, mask, scale)  # type: ignore[no-any-return]


def attends_on_a_cpu(q: torch.Tensor, v: torch.Tensor, *, kernels: str = "auto") -> bool:
    """Whether the kernel for CPUs computes `flash_attention` of such heads under a plain mask."""
    return flash.fits(q, v) and choose("flash_attention", kernels, q, v) is choice.TABLE["flash_attention"].native


def paged_attention(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: paged.Paged,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    *,
    kernels: str = "auto",
) -> torch.Tensor:
    """Attention of new tokens, those of many sequences in one row, to all tokens of their own sequence in pages.

    Args:
        q: [n, a, d].
        key_pages: [pages, page size, g, d], the new tokens' keys among them; query head i uses head i // (a / g).
        value_pages: [pages, page size, g, d_v].
        context: the sequence of each token, and the pages (`layers/inference_context`). A token sees itself and earlier
            ones.
        scale: factor of the scores.
        window: tokens at a distance of this or more are not seen.
        softcap: c, if a score x becomes c tanh(x / c).
        sink: [a], the score of one more key for each head, whose value is 0.

    Returns:
        [n, a, d_v].
    """
    scores = paged.Scores(scale, window, softcap, sink)
    if kernels == "auto" and sink is None and paged.fits_flash_attn(q, key_pages, value_pages, context):
        return paged.by_flash_attn(q, key_pages, value_pages, context, scores)
    attend = choose("paged_attention", kernels, q, key_pages, value_pages)
    return attend(q, key_pages, value_pages, context, scores)  # type: ignore[no-any-return]


def keep_tokens(tokens: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Write new tokens' state, such as keys or values, into pages.

    Args:
        tokens: [n, *shape].
        pages: [pages, page size, *shape], any strides.
        rows: [n] int64, the slot of each token: page * page size + place in the page (vLLM's `slot_mapping`).
    """
    choose("keep_tokens", "auto", tokens, pages)(tokens, pages, rows)


def rope_and_keep(
    packed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: torch.Tensor,
    *,
    kernels: str = "auto",
) -> torch.Tensor:
    """`rope` of queries and keys, and `keep_tokens` of keys and values; on a CPU in one pass.

    Args:
        packed: [n, 1, g, a/g + 2, d], the queries, the key and the value of each group.
        cos, sin: [n, 1, 1, rotated / 2].
        interleaved: see `rope`.
        key_pages, value_pages, rows: see `keep_tokens`.

    Returns:
        The turned queries, [n, 1, a, d].
    """
    if choice.in_inference(kernels, "few_rows", packed, key_pages, value_pages):
        turned = few_rows.rope_and_keep(packed, cos, sin, interleaved, key_pages, value_pages, rows)
        if turned is not None:
            return turned
    q, k, v = heads(packed, cos, sin, interleaved, kernels=kernels)
    keep_tokens(k.flatten(0, 1), key_pages, rows)
    keep_tokens(v.flatten(0, 1), value_pages, rows)
    return q


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, first: int, real: int, *, kernels: str = "auto"
) -> CrossEntropyPart:
    """The part of a rank that has the words first .. first + real - 1.

    Args:
        logits: [..., w]; computed in fp32 (fp64 stays fp64).
        target: [...] of global ids.
        first: this rank's first word.
        real: columns that are words; the rest is padding.
    """
    return choose("cross_entropy", kernels, logits)(logits, target, first, real)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------- experts


def permutation(
    tokens: torch.Tensor, wanted: torch.Tensor, row: torch.Tensor, most: int, *, kernels: str = "auto"
) -> Permutation:
    """The permutation of tokens into rows of experts, built without the number of rows.

    Args:
        tokens: [T, h].
        wanted: [T, E'] bool, the experts of each token.
        row: [E', T], the row of every pair, garbage where the pair is not wanted.
        most: the most experts of a token.
    """
    return choose("permutation", kernels, tokens)(tokens, wanted, row, most)  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------------- fp8

Cast = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def fp8_cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, seen: torch.Tensor | None = None, *, kernels: str = "auto"
) -> Cast:
    """x [m, n] times `scale` in FP8: (q [m, n]; q^T [n, m] if the cast writes it too, else None; 1 / scale).

    Args:
        seen: fp32 scalar that is raised to the amax of x; NaN if x has one.
    """
    return choose("fp8_cast", kernels, x)(x, scale, dtype, seen)  # type: ignore[no-any-return]


def fp8_magnitudes(x: torch.Tensor, *, kernels: str = "auto") -> torch.Tensor:
    """fp32, one number or a few: their maximum is the amax of x, infinity if x has a NaN."""
    return choose("fp8_magnitudes", kernels, x)(x)  # type: ignore[no-any-return]


def fp8_cast_by(
    x: torch.Tensor, amaxes: torch.Tensor, dtype: torch.dtype, margin: int = 0, *, kernels: str = "auto"
) -> Cast:
    """`fp8_cast` with the scale that follows from the largest of `amaxes` (`reference.scale_for`)."""
    return choose("fp8_cast_by", kernels, x)(x, amaxes, dtype, margin)  # type: ignore[no-any-return]


def fp8_cast_tiles(
    x: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype, rule: str, *, kernels: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, n] -> (q [m, n], scales of its tiles): x is q times the scale of its tile (`reference.tile_scales`)."""
    return choose("fp8_cast_tiles", kernels, x)(x, tile, dtype, rule)  # type: ignore[no-any-return]


def fp8_dequantise(
    q: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int], *, kernels: str = "auto"
) -> torch.Tensor:
    """q [m, n] in FP8 times the scales of its tiles, in bf16."""
    return choose("fp8_dequantise", kernels, scales)(q, scales, tile)  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------- optimizer


def squared_norms(
    grads: Sequence[torch.Tensor], tables: optimizer.Tables, *, kernels: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Squares of gradients, added up in fp64 over pieces of `plain.PIECE` elements.

    Args:
        grads: not empty, of any dtypes and shapes, none without elements.
        tables: cache for these gradients, in this step and in later ones.

    Returns:
        For every piece the sum of squares, and a number that is not 0 if elements are not finite (fp64); and the
        order of the gradients in them.
    """
    fits = all(g.is_contiguous() and choice.usable(kernels, "optimizer", g) for g in grads)
    read = choice.TABLE["squared_norms"].kernel if fits else choice.TABLE["squared_norms"].torch
    assert read is not None, "squared_norms has a kernel"
    return read(grads, tables)  # type: ignore[no-any-return]


def optimizer_step(
    inner: Any,
    mains: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor | None],
    factor: float,
    tables: optimizer.Tables,
    *,
    kernels: str = "auto",
) -> None:
    """One step of an optimizer with gradients times `factor`, then rounding of the main parameters. Consumes the
    gradients.

    The kernel supports AdamW alone, of contiguous tensors on one device, with main parameters of one dtype.

    Args:
        inner: an optimizer of torch's interface, with state for every main parameter; its groups have learning rate and
            decay.
        mains: main parameters.
        grads: of any dtypes.
        copies: model parameters that a main parameter is rounded into, or None.
        tables: cache for these tensors, in this step and in later ones.
    """
    tensors = [*mains, *grads, *(c for c in copies if c is not None)]
    known = isinstance(inner, torch.optim.AdamW) and all(
        t.is_contiguous() and t.device == mains[0].device for t in tensors
    )
    known = known and len(mains) > 0
    step = choose("optimizer_step", kernels if known else "torch", *mains)
    step(inner, mains, grads, copies, factor, tables)
