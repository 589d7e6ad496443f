"""Launches a compiled kernel on the emulator of threads: its accesses to each array, where it failed, and why.

The problem in a sentence: a launch shows more than its results: which words it accessed, how often, how wide, in which
order of the threads, and at which line it failed.

`Emulator` loads a library of `labkit/cuda.py` and launches it. It runs in the notebook's process, where learners try
their kernels, and in the judge's process beside a check (`labkit/kernel_service.py`), whose counts no learner's Python
can reach.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.cuda_text import ARRAYS, Parameter
from minimegatron.kernels.operators import KernelError

TURNS = 20_000_000_000  # of all loops of all threads in one launch: more is a loop without an end
CHECKED_TURNS = 50_000_000  # in a check, whose cases are small
_C_KINDS: dict[str, Any] = {"int": ctypes.c_int, "float": ctypes.c_double}


class LaunchError(KernelError):
    """A launch failed: an access out of bounds, a race, a barrier that not all threads meet. `line` is of the cell."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what, where=f"line {line} of the cell" if line else "", fix="mend the kernel, or its launch")
        self.line = line


@dataclasses.dataclass(frozen=True)
class Launch:
    """The result of one launch.

    Attributes:
        counts: by array: `loads`, `stores` of single threads, bytes `read`, `written`, bytes `served` for the loads
            of whole warps, and `share` = read / served; `barriers` that a thread met and `atomics` of a block, on
            average; `shared_loads` of the busiest thread in one block.
        writes: by array that is not const: how often each number was written, at most 255.
        note: something that is no error, but explains a wrong result, such as a word that was read before it was
            written.
    """

    counts: dict[str, Any]
    writes: dict[str, torch.Tensor]
    note: str = ""


class Emulator:
    """The library of one kernel.

    Args:
        path: path of the shared object.
        name: name of the kernel.
        parameters: its parameters.
    """

    def __init__(self, path: Path, name: str, parameters: Sequence[Parameter]) -> None:
        self.name, self.parameters = name, tuple(parameters)
        self.arrays = [p for p in parameters if "*" in p.kind]
        self._c = ctypes.CDLL(str(path))
        kinds = [_C_KINDS.get(p.kind, ctypes.c_void_p) for p in parameters] + [ctypes.c_int64] * len(self.arrays)
        self._c.lab_launch.argtypes = [*kinds, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self._c.lab_limit.argtypes = [ctypes.c_longlong, ctypes.c_int]
        self._c.mm_emulator_message.restype = self._c.lab_note.restype = ctypes.c_char_p

    def launch(
        self, args: Sequence[Any], grid: int, block: int, *, order: int = 0, turns: int = TURNS, quiet: bool = False
    ) -> Launch:
        """Run `grid` blocks of `block` threads; `fitting` has checked the arguments.

        Args:
            order: order of threads: 0 forward, 1 backward, n > 1 shuffled by seed n.
            turns: turns of all loops together, after which it is stopped.
            quiet: printf prints nothing.
        Raises:
            LaunchError: it failed.
        """
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        raw = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        self._c.lab_limit(turns, quiet)
        self._c.mm_emulator_order(order)
        self._c.mm_emulator_counters((ctypes.c_longlong * 4)())
        error = self._c.lab_launch(*raw, *(t.numel() for t in tensors), grid, block, None)
        self._c.mm_emulator_order(0)
        counters, numbers = (ctypes.c_longlong * 4)(), (ctypes.c_longlong * (3 + 6 * ARRAYS))()
        self._c.mm_emulator_counters(counters)
        self._c.lab_numbers(numbers)
        line, note_line, busiest, *rest = list(numbers)
        if error:
            said = self._c.mm_emulator_message().decode(errors="replace")
            raise LaunchError(f"error {error}: {said}", line)
        counts: dict[str, Any] = {
            "barriers": counters[1] / (grid * block), "atomics": counters[3] / grid, "shared_loads": busiest,
        }  # fmt: skip
        for i, (_, what) in enumerate(self.arrays):
            loads, read, sectors, stores, written, _ = rest[6 * i : 6 * i + 6]
            served = 32 * sectors
            counts[what] = {
                "loads": loads, "stores": stores, "read": read, "written": written, "served": served,
                "share": read / served if served else 0.0,
            }  # fmt: skip
        note = self._c.lab_note().decode(errors="replace")
        return Launch(counts, self._writes(tensors), f"line {note_line}: {note}" if note else "")

    def _writes(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for i, (parameter, tensor) in enumerate(zip(self.arrays, tensors, strict=True)):
            if not parameter.kind.startswith("const"):
                found[parameter.name] = torch.zeros(tensor.shape, dtype=torch.uint8)
                self._c.lab_writes(i, ctypes.c_void_p(found[parameter.name].data_ptr()))
        return found


def fitting(name: str, parameters: Sequence[Parameter], args: Sequence[Any], grid: Any, block: Any) -> None:
    """Check arguments against the parameters.

    Raises:
        KernelError: one does not fit.
    """
    if len(args) != len(parameters):
        raise KernelError(f"{name} takes {len(parameters)} arguments, not {len(args)}")
    for value, (kind, what) in zip(args, parameters, strict=True):
        if "*" in kind:
            want = torch.float32 if "float" in kind else torch.int32
            fits = isinstance(value, torch.Tensor) and value.dtype == want and value.is_contiguous()
            if not fits:
                shown = f"{value.dtype}, strides {value.stride()}" if isinstance(value, torch.Tensor) else repr(value)
                raise KernelError(f"{name}: {what} wants a contiguous tensor of {want}, got {shown}"[:200])
        elif isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
            raise KernelError(f"{name}: {what} wants {kind}, got {value!r}"[:200])
        elif isinstance(value, int) and abs(value) >= 1 << 1000:  # no double can hold it
            raise KernelError(f"{name}: {what} is no number of C++"[:200])
        elif kind == "int" and not -(1 << 31) <= value < 1 << 31:
            raise KernelError(f"{name}: {what} is an int of 32 bits, got {value!r}"[:200])
    for what, value, most in (("grid", grid, (1 << 31) - 1), ("block", block, 1024)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise KernelError(f"{name}: {what} is a number from 1 to {most}, got {value!r}"[:200])
