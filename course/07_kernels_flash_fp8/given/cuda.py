"""A learner's kernel: CUDA C++ in a cell, run thread by thread on any CPU, and by nvcc where there is a GPU.

The problem in a sentence: a lab on kernels must let learners write real CUDA, on laptops that have no GPU, and must see
what their kernel does to memory, not only what it returns.

In the cell the kernel is a text, as it would stand in a `.cu` file::

    kernel = Kernel(r'''
    __global__ void scale(const float* x, float* y, int n, float by) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = by * x[i];
    }
    ''')
    kernel(x, y, n, 2.0, grid=(n + 255) // 256, block=256)
    kernel.counts["x"]["share"]     # of the bytes that the memory served for x, how many were asked for

| where            | what is compiled                                                                              |
|------------------|-----------------------------------------------------------------------------------------------|
| tensors on a CPU | the text, by g++, behind a header with CUDA's names (`csrc/lab.h`). The compiler itself puts  |
|                  | a call before each load and store (`-fsanitize=thread`); the functions that are called are    |
|                  | the lab's, they count and check (`csrc/runtime.cc`), on the package's emulator of threads     |
| tensors on a GPU | the text, by nvcc                                                                             |

Pointers are pointers, so everything that C++ has may be written. `compiling.py` builds a library once
for each text.

**In a check** the learner's process may start no program. So the kernels of a cell are compiled before it, in a process
that may (`prepare`), and the libraries are handed on as `labkit.tools.prepared`. A launch runs in several orders of
its threads, on arrays that hold NaN before, and is noted (`labkit.tools.note`):

| entry       | contents                                                                                            |
|-------------|-----------------------------------------------------------------------------------------------------|
| `name`      | of the kernel                                                                                       |
| `arrays`    | {parameter: tensor as it was given}; `numbers`: {parameter: int or float}                           |
| `grid`      | and `block`: how many                                                                               |
| `outputs`   | for each order of the threads that was tried: {parameter that is not const: tensor}                 |
| `writes`    | {parameter that is not const: how often each number was written}                                    |
| `counts`    | as `Kernel.counts`                                                                                  |
| `note`      | explains a wrong result; `error` and `line`: why the launch failed                                  |
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labkit import tools

from .emulator import (
    CHECKED_STEPS,
    Emulator,
    KernelError,
    LaunchError,
    Parameter,
    count_of,
    fitting,
    parameters_of,
    three,
    values_of,
)  # fmt: skip
from .text import CompileError, digest, indexed_at_run_time, kernel_of, todo

STUB = "your code here"
ORDERS = (0, 1, 2, 3)  # of the threads, in a check


class Kernel:
    """One `__global__` function.

    Args:
        source: CUDA C++; its parameters are pointers and numbers.
        name: the kernel to launch, if the text has several, and the arguments of a template: `norm<256>`.

    Attributes:
        counts: memory accesses of the last call, all threads together; empty on a GPU. For each array, by the name
            of its parameter: `loads` and `stores` of single threads, bytes `read` and `written`, bytes that the memory
            `served` for the loads of whole warps, and `share` = read / served. Under `barriers` how often a thread
            met `__syncthreads`, on average.
        order: order of threads on the emulator: 0 forward, 1 backward, n > 1 shuffled by seed n.
    """

    def __init__(self, source: str, name: str = "") -> None:
        self.source, self.name, self.order = source, name, 0
        self.line = sys._getframe(1).f_lineno
        self.counts: dict[str, Any] = {}

    def __call__(
        self, *args: Any, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared_mem: int = 0
    ) -> None:
        """Launch `grid` blocks of `block` threads, each a number or (x, y, z).

        Tensors are contiguous and of the parameter's dtype; None is a null pointer. `shared_mem` is the bytes of
        `extern __shared__` arrays.

        Raises:
            NotImplementedError: the kernel is still to be written.
            CompileError: it is not right C++.
            KernelError: the launch failed: an access out of bounds, a deadlock, arguments that do not fit.
        """
        if todo(self.source):
            raise NotImplementedError(STUB)
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in args):
            self.counts = {}
            return _on_gpu(self.source, self.line, self.name)(args, grid, block, shared_mem)
        kernel = _emulator(self.source, self.line, self.name)
        fitting(kernel.name, kernel.parameters, args, grid, block, shared_mem)
        if tools.prepared is None:
            self.counts = kernel.launch(args, grid, block, shared_mem=shared_mem, order=self.order).counts
        else:
            self.counts = _noted(kernel, args, grid, block, shared_mem)
        return None


# -------------------------------------------------------------------------------------------------------- libraries


@functools.cache
def _emulator(source: str, line: int, name: str) -> Emulator:
    """The library of a text, cached for the process."""
    kernel = kernel_of(source, line, name)
    if tools.prepared is None:
        from .compiling import build_library  # a check has done so before, and its process may not

        path = build_library(source, line, kernel.name)
    else:
        known = tools.prepared.get(digest(source + name))
        if known is None:
            raise KernelError('this kernel was not compiled before the check: write its text in Kernel(r"""...""")')
        path = Path(tempfile.mkdtemp(dir=os.getcwd())) / "lib.so"
        path.write_bytes(known.numpy().tobytes())
    return Emulator(path, kernel.name, kernel.parameters, source, line)


@functools.cache
def _on_gpu(source: str, line: int, name: str) -> Callable[..., None]:
    """The launch of a text that nvcc has compiled."""
    from .compiling import build_for_gpu

    kernel = kernel_of(source, line, name)
    library = ctypes.CDLL(os.fspath(build_for_gpu(source, line, kernel.name)))
    library.lab_launch.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_void_p]
    parameters = parameters_of(library, kernel.parameters)

    def launch(args: tuple[Any, ...], grid: Any, block: Any, shared_mem: int) -> None:
        fitting(kernel.name, parameters, args, grid, block, shared_mem)
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        if any(isinstance(value, torch.Tensor) and value.device != device for value in args):
            raise KernelError(f"{kernel.name}: some of its arrays are on {device}, others are not")
        values, keep = values_of(parameters, args, lambda tensor: tensor.data_ptr())
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            error = library.lab_launch(values, three(grid), three(block), shared_mem, stream)
        del keep
        if error:
            raise KernelError(f"{kernel.name} failed with error {error}: see cudaError_t")

    return launch


# ------------------------------------------------------------------------------------------------------ in a check


def _noted(kernel: Emulator, args: tuple[Any, ...], grid: Any, block: Any, shared_mem: int) -> dict[str, Any]:
    """In a check: launch in several orders of the threads and note it; the result of the first order is the result."""
    named = list(zip(kernel.parameters, args, strict=True))
    record: dict[str, Any] = {
        "name": kernel.name, "grid": count_of(grid), "block": count_of(block), "outputs": [], "writes": {},
        "counts": {}, "note": "", "error": "", "line": 0,
        "arrays": {p.name: value.clone() for p, value in named if isinstance(value, torch.Tensor)},
        "numbers": {p.name: value for p, value in named if p.kind == "number"},
        "at_run_time": indexed_at_run_time(kernel.source),
    }  # fmt: skip
    try:
        for order in ORDERS:
            fresh = [_before(p, value) for p, value in named]
            done = kernel.launch(
                fresh, grid, block, shared_mem=shared_mem, order=order, steps=CHECKED_STEPS, quiet=order > 0
            )
            if order == 0:
                record.update(counts=done.counts, writes=done.writes)
            record["note"] = record["note"] or done.note
            record["outputs"].append(
                {p.name: one for p, one in zip(kernel.parameters, fresh, strict=True) if p.kind == "output"}
            )
    except LaunchError as error:
        record.update(error=error.what, line=error.line)
        raise
    finally:
        tools.note("launch", record)
    for p, value in named:
        if p.kind == "output" and value is not None:
            value.copy_(record["outputs"][0][p.name])
    return dict(record["counts"])


def _before(parameter: Parameter, value: Any) -> Any:
    """The value that the kernel gets for an argument."""
    if not isinstance(value, torch.Tensor):
        return value
    if parameter.kind == "input":
        return value.clone()
    if value.dtype.is_floating_point:
        return torch.full_like(value, torch.nan)
    return torch.full_like(value, False if value.dtype == torch.bool else torch.iinfo(value.dtype).min)


__all__ = ["CompileError", "Kernel", "KernelError", "LaunchError"]
