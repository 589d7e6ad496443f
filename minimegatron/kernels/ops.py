"""Fused operations: one function for each, which always exists and chooses its implementation.

The problem in a sentence: a layer should say which operation it needs, and not know how this machine computes it.

`TABLE` has a row for every operation and a column for every implementation. A function takes its tensors and
`config.kernels`; from both `choose` finds the column:

| `kernels=` | on a GPU                                  | on a CPU                                          |
|------------|-------------------------------------------|---------------------------------------------------|
| `auto`     | CUDA kernels, torch where they cannot be  | torch; in inference mode kernels for CPUs         |
| `torch`    | torch                                     | torch                                             |
| `cuda`     | CUDA kernels, torch where they cannot be  | torch, and a line says so                         |
| `emulated` | torch, and a line says so                 | the same kernels, thread by thread: slow, to learn |

A kernel file is compiled and loaded before the first of its operators is called, once a process. If that fails (no
compiler, no writable folder, no GPU) torch computes, and one warning a process says why; a kernel that fails while it
runs is an error, never a fallback.

Columns agree to rounding. Each keeps for the backward pass what it needs: the kernel of SwiGLU its input, torch's
operations three tensors of half its size. The implementation of the forward pass also computes the backward pass.

Operations with a message in the middle are objects with a method for each side of the message (`CrossEntropyPart`), or
two functions (`fp8_magnitudes`, `fp8_cast_by`): layers communicate, operations do not.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from minimegatron.errors import DeadlineError
from minimegatron.kernels import (
    blockwise,
    build,
    few_rows,
    flash,
    fp8,
    laid_out,
    operators,
    optimizer,
    paged,
    permute,
    plain,
    pointwise,
    reference,
)
from minimegatron.kernels import cross_entropy as cross_entropy_kernel
from minimegatron.kernels.quantized import Packed

BACKENDS = ("auto", "torch", "cuda", "emulated")


class Row(NamedTuple):
    """The implementations of an operation; all take the same arguments.

    Attributes:
        file: in `csrc`, without `.cu`; None if there is no kernel.
        kernel: by that file, on a GPU or emulated.
        torch: by torch's operations, anywhere.
        cpu: by a kernel for CPUs, which has no backward pass: `auto` takes it in `torch.inference_mode()`.
        cpu_file: in `csrc`, without `.cpp`.
    """

    file: str | None
    kernel: Callable[..., Any] | None
    torch: Callable[..., Any]
    cpu: Callable[..., Any] | None = None
    cpu_file: str = "few_rows"


TABLE = {
    # operation               kernel file         by a kernel                 by torch
    "norm":               Row("norm",             pointwise.norm,             plain.norm,     few_rows.norm),
    "add_norm":           Row("norm",             pointwise.add_norm,         plain.add_norm, few_rows.add_norm),
    "swiglu":             Row("activation",       pointwise.swiglu,           plain.swiglu,   few_rows.swiglu),
    "geglu":              Row(None,               None,                       plain.geglu),
    "geglu_tanh":         Row(None,               None,                       plain.geglu_tanh),
    "gelu":               Row(None,               None,                       F.gelu),
    "gelu_tanh":          Row(None,               None,                       plain.gelu_tanh),
    "relu":               Row(None,               None,                       F.relu),
    "squared_relu":       Row(None,               None,                       plain.squared_relu),
    "silu":               Row(None,               None,                       F.silu),
    "bias_gelu":          Row("activation",       pointwise.gelu_of,        plain.bias_gelu),
    "rope":               Row("rope",             pointwise.turn,             plain.rope,     few_rows.rope),
    "scaled_softmax":     Row("softmax",          pointwise.scaled_softmax,   reference.scaled_softmax),
    "flash_attention":    Row("flash_attention",  flash.causal,               blockwise.flash_attention),
    "paged_attention":    Row("paged_attention",  paged.by_a_kernel,          paged.paged_attention, paged.on_a_cpu,
                              "paged_attention"),
    "keep_tokens":        Row(None,               None,                       paged.keep_tokens, paged.keep_on_a_cpu,
                              "paged_attention"),
    "cross_entropy":      Row("cross_entropy",    cross_entropy_kernel.CrossEntropyPart,     plain.CrossEntropyPart),
    "permutation":        Row("permute",          permute.Permutation,        plain.Permutation),
    "fp8_cast":           Row("fp8",              fp8.cast_both_ways,         plain.fp8_cast),
    "fp8_magnitudes":     Row("fp8",              fp8.magnitudes,             plain.fp8_magnitudes),
    "fp8_cast_by":        Row("fp8",              fp8.cast_by_both_ways,      plain.fp8_cast_by),
    "fp8_cast_tiles":     Row("fp8",              fp8.cast_tiles,             reference.fp8_cast_tiles),
    "fp8_dequantise":     Row("fp8",              fp8.dequantise,             plain.fp8_dequantise),
    "squared_norms":      Row("optimizer",        optimizer.squared_norms,    plain.squared_norms),
    "optimizer_step":     Row("optimizer",        optimizer.adamw_step,       plain.optimizer_step),
}  # fmt: skip


def choose(op: str, kernels: str, *tensors: torch.Tensor | None) -> Callable[..., Any]:
    """The implementation of an operation.

    Args:
        op: a row of `TABLE`.
        kernels: `config.kernels`.
        tensors: arguments that decide; kernels need one dtype, which they support.
    """
    row = TABLE[op]
    if row.cpu is not None and usable_on_a_cpu(kernels, row.cpu_file, *tensors):
        return row.cpu
    if row.kernel is not None and row.file is not None and usable(kernels, row.file, *tensors):
        return row.kernel
    return row.torch


def usable(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """Whether the operators of a kernel file compute, rather than torch.

    Args:
        backend: `config.kernels`.
        file: in `csrc`, without `.cu`.
        tensors: arguments of the operator; kernels need one dtype, which they support.
    """
    given = [t for t in tensors if t is not None]
    if backend == "torch" or (backend == "auto" and not any(t.is_cuda for t in given)):
        return False
    if any(t.dtype not in operators.DTYPES or t.dtype != given[0].dtype for t in given):
        return False
    target = target_of(backend, given[0].device.type)
    return target != "torch" and _possible(target) and _available(file, target)


def usable_on_a_cpu(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """Whether the kernel for CPUs is to compute; see `usable`."""
    if backend != "auto" or laid_out.observed() or not torch.is_inference_mode_enabled():
        return False
    dtype = None  # asked for several times a layer: a loop is cheaper than a generator
    for t in tensors:
        if t is not None:
            dtype = dtype or t.dtype
            if t.dtype != dtype or not t.is_cpu:
                return False
    return dtype in operators.CPU_DTYPES and _possible("cpu") and _available(file, "cpu")


def target_of(backend: str, device: str) -> str:
    """The target that should compute on a device ("cpu" or "cuda"): `torch`, `cuda` or `emulated`."""
    assert backend in BACKENDS, f"kernels={backend!r} is none of {BACKENDS}"
    if backend == "auto":
        return "cuda" if device == "cuda" else "torch"
    if backend == "torch" or device not in ("cpu", "cuda"):
        return "torch"
    if (backend == "cuda") == (device == "cuda"):
        return backend
    _say(backend, f"the tensors are on the {'CPU' if device == 'cpu' else 'GPU'}")
    return "torch"


def obstacle(target: str) -> str | None:
    """Why no kernel at all can be built for a target of `build` on this machine; None if some can."""
    if build.compiler(target) is None:
        return f"this machine has no {'nvcc' if target == 'cuda' else 'g++ or clang++'}"
    folder = build.cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return f"{folder} cannot be written: set MINIMEGATRON_KERNEL_CACHE to a folder that can"
    return None


@functools.cache
def _possible(target: str) -> bool:
    reason = obstacle(target)
    if reason is not None:
        _say(target, reason)
    return reason is None


@functools.cache
def _available(file: str, target: str) -> bool:
    try:
        operators.library(file, target)
        return True
    except (build.KernelsUnavailable, DeadlineError, OSError) as error:
        _say(target, str(error).replace("\n", "; "))
        return False


@functools.cache
def _say(backend: str, reason: str) -> None:
    """Print one line, once a process."""
    warnings.warn(f"kernels={backend}: torch computes instead, because {reason}", stacklevel=2)


def linear(x: torch.Tensor, weight: torch.Tensor | Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., i], weight [o, i] -> [..., o] without a gradient, by what the weight has for it.

    Args:
        x: as many rows as one likes.
        weight: a tensor, by a kernel for very few rows (`few_rows`) or a layout where it has one (`laid_out`); or words
            (`quantized.Packed`).
        bias: [o].
    """
    if isinstance(weight, Packed):
        return weight.linear(x, bias, usable_on_a_cpu("auto", "quantized", x))
    if few_rows.fits(x, weight) and usable_on_a_cpu("auto", "few_rows", x, weight, bias):
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


def activation(kind: str, x: torch.Tensor, *, kernels: str = "auto") -> torch.Tensor:
    """The activation of an MLP: one of `config.activation`.

    gelu, gelu_tanh, relu, squared_relu and silu are elementwise; swiglu, geglu and geglu_tanh halve the last dim:
    [..., 2 f] = [gate, up] -> act(gate) * up.
    """
    return choose(kind, kernels, x)(x)  # type: ignore[no-any-return]


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


# ---------------------------------------------------------------------------------------------- attention, the loss


class Mask(blockwise.Visibility, Protocol):
    """Which query sees which key: `layers/attention/mask.AttentionMask`."""

    @property
    def causal(self) -> bool: ...

    def dense(self, s: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The whole table; None where causal or full attention says the same."""
        ...


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

    The kernel supports causal attention alone, of heads of at most 128 channels, without a cap on scores.
    """
    if softcap is not None:
        return blockwise.flash_attention(q, k, v, mask, scale, softcap=softcap)
    known = mask.causal and mask.dense(q.shape[2], q.device) is None and q.shape[-1] <= flash.MAX_HEAD
    attend = choose("flash_attention", kernels if known else "torch", q, k, v)
    return attend(q, k, v, mask, scale)  # type: ignore[no-any-return]


def paged_attention(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    context: paged.Paged,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    kernels: str = "auto",
) -> torch.Tensor:
    """Attention of the new tokens of many sequences, in one row, to all tokens of their own sequence, in pages.

    Args:
        q: [n, a, d].
        key_pages: [pages, page size, g, d], the new tokens' keys among them; query head i uses head i // (a / g).
        value_pages: [pages, page size, g, d_v].
        context: the sequence of each token, and the pages (`layers/inference_context`). A token sees itself and earlier
            ones.
        scale: factor of the scores.
        window: tokens at a distance of this or more are not seen.
        softcap: c, if a score x becomes c tanh(x / c).

    Returns:
        [n, a, d_v].
    """
    if kernels == "auto" and paged.fits_flash_attn(q, key_pages, value_pages, context):
        return paged.by_flash_attn(q, key_pages, value_pages, context, scale, window, softcap)
    attend = choose("paged_attention", kernels, q, key_pages, value_pages)
    return attend(q, key_pages, value_pages, context, scale, window, softcap)  # type: ignore[no-any-return]


def keep_tokens(tokens: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Write what is kept of new tokens into pages.

    Args:
        tokens: [n, *shape].
        pages: [pages, page size, *shape], by strides.
        rows: [n] int64, the row of each token in all pages one behind the other.
    """
    choose("keep_tokens", "auto", tokens, pages)(tokens, pages, rows)


def turn_and_keep(
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
    if usable_on_a_cpu(kernels, "few_rows", packed, key_pages, value_pages):
        turned = few_rows.turn_and_keep(packed, cos, sin, interleaved, key_pages, value_pages, rows)
        if turned is not None:
            return turned
    q, k, v = packed.split([packed.shape[3] - 2, 1, 1], 3)
    q, k = (rope(t, cos, sin, interleaved, kernels=kernels) for t in (q.flatten(2, 3), k.squeeze(3)))
    keep_tokens(k.flatten(0, 1), key_pages, rows)
    keep_tokens(v.squeeze(3).flatten(0, 1), value_pages, rows)
    return q


class CrossEntropyPart(Protocol):
    """One rank's part of a cross entropy over a cut vocabulary; between two methods ranks combine their results.

    Attributes:
        target: the targets, in the shape of the methods' results.
    """

    target: torch.Tensor

    def top(self) -> torch.Tensor:
        """The largest logit of every row."""
        ...

    def sums(self, top: torch.Tensor, spread: bool) -> list[torch.Tensor]:
        """The terms that are summed over ranks, given the largest logit of all ranks.

        Returns:
            The target's logit, 0 if another rank has it; the sum of exp(z - top); with `spread` the sum of z. The
            first and the last are relative to a z that all ranks share, 0 or top.
        """
        ...

    def lse(self, top: torch.Tensor, partition: torch.Tensor) -> torch.Tensor:
        """log of the sum of exp(z), relative to the same z; `partition` is the second sum over all ranks."""
        ...

    def kept(self, partition: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the backward pass needs."""
        ...

    @staticmethod
    def gradient(
        kept: tuple[torch.Tensor, ...], dloss: torch.Tensor, first: int, real: int, hit: float, spread: float
    ) -> torch.Tensor:
        """(softmax_j - spread - hit [j is the target]) dloss, 0 in padding: [..., w]. May be written over `kept`."""
        ...


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


class Permutation(Protocol):
    """Permutes tokens into rows of experts, and back."""

    def permute(self, pairs: torch.Tensor) -> torch.Tensor:
        """[n, h], the rows; `pairs` [n]: t E' + e of every row."""
        ...

    def unpermute(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, h], in the order of `permute` -> [T, h]: each row added to its token."""
        ...


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
    fits = all(g.is_contiguous() and usable(kernels, "optimizer", g) for g in grads)
    read = TABLE["squared_norms"].kernel if fits else TABLE["squared_norms"].torch
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
