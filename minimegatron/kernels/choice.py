"""Which implementation of a fused operation computes: a CUDA kernel, the same kernel emulated, a CPU kernel, or torch.

`TABLE` has a row for each operation and a column for each implementation; `choose` picks the column from
`config.kernels` and the tensors:

| `kernels=` | on a GPU                                  | on a CPU                                                  |
|------------|-------------------------------------------|-----------------------------------------------------------|
| `auto`     | CUDA kernels, torch where they cannot run | kernels for CPUs, torch where there is none               |
| `torch`    | torch                                     | torch                                                     |
| `cuda`     | CUDA kernels, torch where they cannot run | torch, with one warning                                   |
| `emulated` | torch, with one warning                   | the CUDA kernels, thread by thread: slow, for learning    |

The first call of an operator compiles and loads its kernel file, once a process: a second or two for a CPU, once a
machine. If that fails (no compiler, no writable folder, no GPU), torch computes and one warning a process says why;
`auto` on a CPU without a compiler says nothing, since nothing was asked for (`minimegatron doctor` does). A kernel that
fails while it runs is an error, never a fallback.

Columns agree to rounding; in bf16 torch rounds between two operations, kernels at the end. The implementation of the
forward pass also computes the backward pass, and each saves for it what it needs itself: the SwiGLU kernel its input,
torch three tensors of half that size.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minimegatron.errors import DeadlineError
from minimegatron.kernels import (
    blockwise,
    build,
    chunk_scan,
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
    rope,
)
from minimegatron.kernels import cross_entropy as cross_entropy_kernel

BACKENDS = ("auto", "torch", "cuda", "emulated")


class Row(NamedTuple):
    """The implementations of an operation; all take the same arguments.

    Attributes:
        file: the kernel's file in `csrc`, without `.cu`; None without a kernel.
        kernel: calls the kernel, on a GPU or emulated.
        torch: calls torch's operations, on any device.
        native: calls `file` + `.cpp`, the kernel's twin for CPUs.
        inference: calls a kernel for CPUs without a torch operator around it, so without a backward pass; `auto`
            takes it under `torch.inference_mode()`.
        inference_file: that kernel's file in `csrc`, without `.cpp`; default `file`.
    """

    file: str | None
    kernel: Callable[..., Any] | None
    torch: Callable[..., Any]
    native: Callable[..., Any] | None = None
    inference: Callable[..., Any] | None = None
    inference_file: str | None = None


def _native(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(kernel, native=True)


TABLE = {
    # operation               kernel file         by a kernel                 by torch
    #                         by the kernel's twin for CPUs                   on a CPU, under inference mode
    "norm":               Row("norm",             pointwise.norm,             plain.norm,
                              _native(pointwise.norm),                        few_rows.norm),
    "add_norm":           Row("norm",             pointwise.add_norm,         plain.add_norm,
                              _native(pointwise.add_norm),                    few_rows.add_norm),
    "swiglu":             Row("activation",       pointwise.swiglu,           plain.swiglu,
                              _native(pointwise.swiglu),                      few_rows.swiglu),
    "geglu":              Row(None,               None,                       plain.geglu),
    "geglu_tanh":         Row(None,               None,                       plain.geglu_tanh),
    "quick_geglu":        Row(None,               None,                       plain.quick_geglu),
    "gelu":               Row(None,               None,                       F.gelu),
    "gelu_tanh":          Row(None,               None,                       plain.gelu_tanh),
    "quick_gelu":         Row(None,               None,                       plain.quick_gelu),
    "relu":               Row(None,               None,                       F.relu),
    "squared_relu":       Row(None,               None,                       plain.squared_relu),
    "silu":               Row(None,               None,                       F.silu),
    "bias_gelu":          Row("activation",       pointwise.gelu_of,          plain.bias_gelu),
    "rope":               Row("rope",             rope.turn,                  plain.rope,
                              _native(rope.turn),                             few_rows.rope),
    "heads":              Row("rope",             rope.turned_heads,          plain.heads,
                              rope.native_heads),
    "scaled_softmax":     Row("softmax",          pointwise.scaled_softmax,   reference.scaled_softmax),
    "flash_attention":    Row("flash_attention",  flash.plain,                blockwise.flash_attention,
                              _native(flash.plain)),
    "paged_attention":    Row("paged_attention",  paged.by_a_kernel,          paged.paged_attention,
                              None,                                           paged.on_a_cpu),
    "keep_tokens":        Row(None,               None,                       paged.keep_tokens,
                              None,                       paged.keep_on_a_cpu, "paged_attention"),
    "chunk_scan":         Row("chunk_scan",       chunk_scan.chunk_scan,      reference.chunk_scan),
    "cross_entropy":      Row("cross_entropy",    cross_entropy_kernel.CrossEntropyPart,     plain.CrossEntropyPart,
                              cross_entropy_kernel.NativeCrossEntropyPart),
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
        tensors: their devices and dtypes decide; a kernel needs one dtype, which it supports.
    """
    row = TABLE[op]
    if row.inference is not None and in_inference(kernels, row.inference_file or row.file or "", *tensors):
        return row.inference
    if row.kernel is not None and row.file is not None and usable(kernels, row.file, *tensors):
        return row.kernel
    if row.native is not None and row.file is not None and _natively(kernels, row.file, *tensors):
        return row.native
    return row.torch


def usable(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """Whether a kernel file computes, on a GPU or emulated, rather than torch.

    Args:
        backend: `config.kernels`.
        file: in `csrc`, without `.cu`.
        tensors: arguments of the operation; a kernel needs one dtype, which it supports.
    """
    if backend == "torch" or (backend == "auto" and not _on_a_gpu(tensors)):
        return False
    given = [t for t in tensors if t is not None]
    if any(t.dtype not in operators.DTYPES or t.dtype != given[0].dtype for t in given):
        return False
    target = target_of(backend, given[0].device.type)
    return target != "torch" and _possible(target) and _available(file, target)


def _on_a_gpu(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    for t in tensors:  # asked for several times a layer: a loop is cheaper than a generator
        if t is not None and t.is_cuda:
            return True
    return False


def in_inference(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """Whether a kernel for CPUs computes without an operator around it: under inference mode, where nothing watches."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return False
    return unobserved(backend, file, *tensors)


def unobserved(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """The same where no gradient is recorded, as inside of a function that has its own backward pass."""
    return not laid_out.observed() and _natively(backend, file, *tensors)


def _natively(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """Whether a kernel for CPUs computes rather than torch; as `usable`, with a file `.cpp`."""
    if backend != "auto" or torch.compiler.is_compiling():
        return False
    dtype = None
    for t in tensors:
        if t is not None:
            dtype = dtype or t.dtype
            if t.dtype != dtype or not t.is_cpu:
                return False
    return dtype in operators.CPU_DTYPES and _obstacle_on_a_cpu() is None and _available(file, "cpu")


@functools.cache
def _obstacle_on_a_cpu() -> str | None:
    return obstacle("cpu")


def target_of(backend: str, device: str) -> str:
    """What `backend` means on a device ("cpu" or "cuda"): `torch`, `cuda` or `emulated`."""
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
    """Why this machine can build no kernel for a target of `build` ("cuda", "emulated", "cpu"); None if it can, or if
    those for its CPU came with the wheel."""
    if target == "cpu" and all(build.came_along(name) is not None for name in build.sources("cpp")):
        return None
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
    """Warn in one line, once a process for each reason."""
    warnings.warn(f"kernels={backend}: torch computes instead, because {reason}", stacklevel=2)
