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
| tensors on a CPU | what a grammar has understood of the text (`cuda_parse`), with `const float*` read as         |
|                  | `Counted<const float>` (`csrc/lab.h`), by g++, on the package's emulator of threads; each     |
|                  | access is counted and held against its array's bounds                                         |
| tensors on a GPU | the text as it is, by nvcc                                                                    |

The compiler's messages name lines of the cell. A library is built once for each text (`kernels/build.py`); the header,
which most of the time goes into, is compiled beforehand.

**In a check** the learner's process may start no program. So the text is compiled before it, in a process of its own
that knows the text alone: `compile_cell`, under the sandbox and its limits, with one freedom more, to start the
compiler. It runs nothing of the learner's; what it sends back is a library, which a process of the judge's loads beside
the learner's (`beside`, `kernel_service`). A launch is a message to it: there it happens and is counted. A kernel that
was not in the cell as a plain text was not compiled, and is refused: it fails closed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from labkit import channel
from labkit.cuda_text import CompileError, Parameter, digest, explained, parsed, texts, todo, translated
from labkit.emulator import Emulator, LaunchError, fitting
from minimegatron.data.publish import build_once
from minimegatron.errors import MinimegatronError
from minimegatron.kernels import build
from minimegatron.kernels.operators import KernelError, Library

CSRC = Path(__file__).parent / "csrc"
STUB = "your code here"
COMPILE_SECONDS = 45.0
_FAST = (
    "-g0", "-fmax-errors=1", "-w", "-fwrapv", "-fno-strict-aliasing", "-fno-delete-null-pointer-checks",
    "-fstack-clash-protection",
)  # fmt: skip


class Kernel:
    """One `__global__` function.

    Args:
        source: CUDA C++ with one `__global__ void`; its parameters are pointers to float or int, int and float.

    Attributes:
        counts: memory accesses of the last call, all threads together; empty on a GPU. For each array, by the name
            of its parameter: `loads` and `stores` of single threads, bytes `read` and `written`, bytes that the memory
            `served` for the loads of whole warps, and `share` = read / served. Under `barriers` how often a thread
            met `__syncthreads`, on average.
        judged: class attribute: the judge launches (`labkit/kernel_service.py`), as in a check.
        order: order of threads on the emulator: 0 forward, 1 backward, n > 1 shuffled by seed n.
    """

    judged: bool = False

    def __init__(self, source: str) -> None:
        self.source, self.order = source, 0
        self.line = sys._getframe(1).f_lineno
        self.counts: dict[str, Any] = {}

    def __call__(self, *args: Any, grid: int, block: int) -> None:
        """Launch `grid` blocks of `block` threads. Tensors are contiguous and of float32 or int32.

        Raises:
            NotImplementedError: the kernel is still to be written.
            CompileError: it is not right C++.
            KernelError: the launch failed: an access out of bounds, a deadlock, arguments that do not fit.
        """
        if todo(self.source):
            raise NotImplementedError(STUB)
        name, parameters, _ = parsed(self.source, self.line)
        fitting(name, parameters, args, grid, block)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if any(tensor.is_cuda for tensor in tensors):
            self.counts = {}
            sizes = [tensor.numel() for tensor in tensors]
            return _on_gpu(self.source, self.line).call("lab_launch", *args, *sizes, grid, block)
        if Kernel.judged:
            self.counts = self._by_the_judge(parameters, args, grid, block)
        else:
            self.counts = _emulator(self.source, self.line).launch(args, grid, block, order=self.order).counts

    def _by_the_judge(
        self, parameters: list[Parameter], args: tuple[Any, ...], grid: int, block: int
    ) -> dict[str, Any]:
        """In a check: have the judge's process launch, and copy its results."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        numbers = [value for value in args if not isinstance(value, torch.Tensor)]
        head = {"to": "kernels", "do": "launch", "text": digest(self.source), "grid": grid, "block": block}
        try:
            said, results = channel.mine().ask({**head, "numbers": numbers}, tensors)
        except RuntimeError as error:
            raise LaunchError(str(error)) from None
        if "failed" in said:
            raise LaunchError(said["failed"], said["line"])
        arrays = [value for value, (kind, _) in zip(args, parameters, strict=True) if kind in ("float*", "int*")]
        for array, result in zip(arrays, results, strict=True):
            array.copy_(result)
        return dict(said["counts"])


# --------------------------------------------------------------------------------------------------------- building


def header(cache: Path | None = None) -> Path:
    """A folder with `lab.h`, precompiled if the compiler can: this is most of a kernel's compile time.

    Raises:
        KernelsUnavailable: no compiler, or no writable folder.
    """
    program = build.compiler("emulated")
    if program is None:
        raise build.KernelsUnavailable("no g++ or clang++ on this machine", where="kernels", fix="install g++")
    text = re.sub(r'#include "(lab_\w+\.h)"', lambda part: (CSRC / part[1]).read_text(), (CSRC / "lab.h").read_text())
    others = "".join((build.CSRC / name).read_text() for name in ("device.h", "emulator.h"))
    parts = (text, others, build.compiler_version(program), *build.EMULATED_FLAGS, *_FAST)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = (cache or build.cache_folder()) / f"lab-header-{key}"
    if not (folder / "lab.h").is_file():  # asked first: a process in the sandbox may not lock what is outside of it
        build_once(os.fspath(folder), lambda stage: _precompile(program, Path(stage), text), os.path.isdir)
    return folder


def _precompile(program: str, stage: Path, text: str) -> None:
    import subprocess

    (stage / "lab.h").write_text(text)
    flags = [flag for flag in build.EMULATED_FLAGS if flag not in ("-x", "c++", "-shared")]
    command = [program, "-x", "c++-header", *flags, *_FAST, f"-I{build.CSRC}", "lab.h", "-o", "lab.h.gch"]
    done = subprocess.run(command, cwd=stage, capture_output=True, text=True, timeout=build.COMPILE_DEADLINE_S)
    if done.returncode:  # the header itself still serves
        (stage / "lab.h.gch").unlink(missing_ok=True)


def build_library(
    source: str,
    line: int,
    target: str,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    capability: tuple[int, int] | None = None,
) -> Path:
    """The compiled library of a learner's text.

    Args:
        line: line of the cell on which the text begins.
        target: `emulated` or `cuda`.
        folder: result of `header`; by default it is called.
        cache: folder of libraries.
        capability: compute capability of the GPU; by default that of the current one.
    Raises:
        CompileError: the text is refused; with the line of the cell.
        KernelsUnavailable: there is no compiler.
    """
    text = translated(source, line, target == "cuda")
    extra: tuple[str, ...] = ()
    if target == "emulated":
        extra = (f"-I{folder or header()}", *_FAST)
    try:
        return build.library(
            "lab", target, capability=capability, source=text, extra=extra, cache=cache, deadline_s=COMPILE_SECONDS
        )
    except build.KernelsUnavailable as error:
        if "took longer than" in error.what:
            raise CompileError(f"the compiler was not done after {COMPILE_SECONDS:g} s") from None
        if "the compiler refused it" not in error.what:
            raise
        raise explained(error.what) from None


@functools.cache
def _on_gpu(source: str, line: int) -> Library:
    return Library(build_library(source, line, "cuda"), translated(source, line, on_gpu=True), "cuda")


@functools.cache
def _emulator(source: str, line: int) -> Emulator:
    """The library of a text, cached for the process."""
    name, parameters, _ = parsed(source, line)
    return Emulator(build_library(source, line, "emulated"), name, parameters)


# ------------------------------------------------------------------------------------------------------ for a check


def compile_cell(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compile the kernels of a cell; runs in a fresh process of the nursery, under the sandbox.

    Args:
        job: `cell` its text, `header` the folder of `header`, `hidden` what must not be read.

    Returns:
        `{"libraries": {digest: for `KernelService`}}`, `{"todo": True}`,
        `{"error": text, "line": n}`, or `{"unavailable": text}`.
    """
    from labkit import sandbox

    sandbox.enter(Path.cwd(), hidden=(Path(job["hidden"]),), programs=True, extra=(Path(job["header"]),))
    try:
        found = texts(job["cell"])
        if any(todo(source) for source, _ in found):
            return {"todo": True}
        libraries = {}
        for source, line in found:
            folder, here = Path(job["header"]), Path.cwd() / "cache"
            path = build_library(source, line, "emulated", folder=folder, cache=here)
            name, parameters, _ = parsed(source, line)
            raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            libraries[digest(source)] = {"library": raw, "name": name, "parameters": [list(p) for p in parameters]}
        return {"libraries": libraries}
    except CompileError as error:
        return {"error": error.what, "line": error.line}
    except MinimegatronError as error:
        return {"unavailable": error.what}


__all__ = ["CompileError", "Kernel", "KernelError", "LaunchError", "compile_cell", "header", "texts", "todo"]
