"""The kernel families, and whether their kernels can be had on this machine.

A family is a module of this package with the operators of one kernel file. Before the first of them is called the file
is compiled and loaded, once a process; where that fails torch computes, and one warning says why (`switch.py`).
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from types import ModuleType

import torch

from minimegatron.errors import DeadlineError
from minimegatron.kernels import build, launch

# module of this package -> its kernel file
FILES = {
    "norm": "norm",
    "softmax": "softmax",
    "activation": "activation",
    "rope": "rope",
    "cross_entropy": "cross_entropy",
    "flash": "flash_attention",
    "optimizer": "optimizer",
    "permute": "permute",
    "fp8": "fp8",
}
BACKENDS = ("auto", "torch", "cuda", "emulated")


def operators(backend: str, family: str, *tensors: torch.Tensor | None) -> ModuleType | None:
    """See `switch.kernels`, which has answered for torch already."""
    given = [t for t in tensors if t is not None]
    if any(t.dtype not in launch.DTYPES or t.dtype != given[0].dtype for t in given):
        return None
    target = target_of(backend, given[0].device.type)
    if target == "torch" or not _possible(target) or not _available(FILES[family], target):
        return None
    return importlib.import_module(f"minimegatron.kernels.{family}")


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
def _available(name: str, target: str) -> bool:
    try:
        launch.library(name, target)
        return True
    except (build.KernelsUnavailable, DeadlineError, OSError) as error:
        _say(target, str(error).replace("\n", "; "))
        return False


@functools.cache
def _say(backend: str, reason: str) -> None:
    """One line, once a process."""
    warnings.warn(f"kernels={backend}: torch computes instead, because {reason}", stacklevel=2)
