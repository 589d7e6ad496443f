"""Large tensors in huge pages of the operating system (2 MiB): fewer address translations.

The problem in a sentence: decoding reads all weights and keys for every token, and a CPU that reads 100 MB in pages of
4 KiB spends half its time on address translation.

One core of a virtual machine (AMD, AVX-512) reads 512 MB at 16 GB/s in pages of 4 KiB, and at 30 GB/s in huge pages.
Linux gives them on request (`madvise`); results stay the same. Other systems ignore the request here.

    empty(...)       a new tensor, allocated in huge pages (MADV_HUGEPAGE)
    collapse(...)    memory in use moves to huge pages now (MADV_COLLAPSE, Linux 6.1), else when the kernel gets to it

Linux: `Documentation/admin-guide/mm/transhuge.rst`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

SIZE = 2 << 20
WORTH = SIZE // 8  # smaller memory stays; what is moved takes along its neighbours in the same 2 MiB
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """libc's `madvise`; None on other systems than Linux."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function  # type: ignore[no-any-return]


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`; on a CPU, and from 2 MiB on, in huge pages."""
    out = torch.empty(shape, dtype=dtype, device=device)
    madvise = _madvise()
    if out.device.type == "cpu" and out.nbytes >= SIZE and madvise is not None:
        first = -(-out.data_ptr() // SIZE) * SIZE
        whole = (out.data_ptr() + out.nbytes - first) // SIZE * SIZE
        if whole > 0:
            madvise(first, whole, MADV_HUGEPAGE)
    return out


def collapse(address: int, nbytes: int) -> None:
    """Move `nbytes` at an address of this process to huge pages, where the system can."""
    madvise = _madvise()
    if madvise is None or nbytes < WORTH:
        return
    for page in range(address // SIZE * SIZE, address + nbytes, SIZE):
        if madvise(page, SIZE, MADV_COLLAPSE):  # fails if a part of the range is not mapped
            madvise(page, SIZE, MADV_HUGEPAGE)
