"""Whether kernels compute, and whether they can be had on this machine.

| `kernels=` | on a GPU                                  | on a CPU                                          |
|------------|-------------------------------------------|---------------------------------------------------|
| `auto`     | CUDA kernels, torch where they cannot be  | torch                                             |
| `torch`    | torch                                     | torch                                             |
| `cuda`     | CUDA kernels, torch where they cannot be  | torch, and a line says so                         |
| `emulated` | torch, and a line says so                 | the same kernels, thread by thread: slow, to learn |

Results are the same to rounding whatever computes. A kernel file is compiled and loaded before the first of its
operators is called, once a process. Where that fails (no compiler, nowhere to write, no GPU) torch computes, and one
warning a process says why; a kernel that fails while it runs is an error, never a fallback.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from minimegatron.errors import DeadlineError
from minimegatron.kernels import build, launch

BACKENDS = ("auto", "torch", "cuda", "emulated")


def usable(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """Whether the operators of a kernel file are to compute, rather than torch.

    Args:
        backend: `config.kernels`.
        file: in `csrc`, without `.cu`.
        tensors: that the operator takes; kernels are for those of one dtype that they know.
    """
    given = [t for t in tensors if t is not None]
    if backend == "torch" or (backend == "auto" and not any(t.is_cuda for t in given)):
        return False
    if any(t.dtype not in launch.DTYPES or t.dtype != given[0].dtype for t in given):
        return False
    target = target_of(backend, given[0].device.type)
    return target != "torch" and _possible(target) and _available(file, target)


def target_of(backend: str, device: str) -> str:
    """What is meant to compute on a device ("cpu" or "cuda"): `torch`, `cuda` or `emulated`."""
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
    """Why no kernel at all can be built for `cuda` or `emulated` on this machine; None where nothing is in the way."""
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
        launch.library(file, target)
        return True
    except (build.KernelsUnavailable, DeadlineError, OSError) as error:
        _say(target, str(error).replace("\n", "; "))
        return False


@functools.cache
def _say(backend: str, reason: str) -> None:
    """One line, once a process."""
    warnings.warn(f"kernels={backend}: torch computes instead, because {reason}", stacklevel=2)
