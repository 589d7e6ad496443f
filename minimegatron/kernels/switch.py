"""One switch: whether torch, a CUDA kernel or an emulated kernel computes.

| `kernels=` | on a GPU                                  | on a CPU                                          |
|------------|-------------------------------------------|---------------------------------------------------|
| `auto`     | CUDA kernels, torch where they cannot be  | torch                                             |
| `torch`    | torch                                     | torch                                             |
| `cuda`     | CUDA kernels, torch where they cannot be  | torch, and a line says so                         |
| `emulated` | torch, and a line says so                 | the same kernels, thread by thread: slow, to learn |

Results are the same to rounding whatever computes. Where a backend cannot be had (no compiler, nowhere to write, no
GPU) torch computes and one warning a process says why; a kernel that fails while it runs is an error, never a fallback.

Layers import this file alone. What compiles, loads and launches kernels (`families.py`) is read when one is wanted.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch


def kernels(backend: str, family: str, *tensors: torch.Tensor | None) -> ModuleType | None:
    """The operators of a family (a module of this package), or None where torch is to compute.

    Args:
        backend: `config.kernels`.
        family: a key of `families.FILES`.
        tensors: that the operator takes; it is for those of one dtype that kernels know.
    """
    if backend == "torch" or (backend == "auto" and not any(t is not None and t.is_cuda for t in tensors)):
        return None
    return _families().operators(backend, family, *tensors)  # type: ignore[no-any-return]


@functools.cache
def _families() -> Any:
    return importlib.import_module("minimegatron.kernels.families")
