"""What would make the host wait if the tensors were a GPU's, found on a CPU.

On a GPU a host that reads a number waits until the device is done; so it does where a tensor is made from numbers of
its own (a copy from pageable memory), and where the size of a result depends on data. All of these pass through torch's
dispatcher or through `tolist`, on a CPU as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
COPIES = {aten.lift_fresh.default}  # torch.tensor, torch.as_tensor
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class Waits(TorchDispatchMode):
    """Inside the block every wait is written down.

    Attributes:
        found: what was called, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS | COPIES:
            self.found.append(str(func))
        if func in INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            self.found.append(f"{func} with a mask")
        if func is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """What made the host wait in the block, in order; a `tolist` is one wait however long."""
    recorder, real = Waits(), torch.Tensor.tolist

    def tolist(self: torch.Tensor) -> Any:
        recorder.found.append("tolist")
        return real(self)

    with mock.patch.object(torch.Tensor, "tolist", tolist), recorder:
        yield recorder.found
