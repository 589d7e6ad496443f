"""Launches a compiled kernel on the emulator of threads: its accesses to each array, where it failed, and why.

The problem in a sentence: a launch shows more than its results: which numbers it accessed, how often, how wide, in
which order of the threads, and at which line it failed.

`Emulator` loads a library that `cuda.py` has built. The threads, barriers and shuffles are those of the package's
emulator (`minimegatron/kernels/csrc/emulator.h`); what a lab sees beyond is `csrc/runtime.cc`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minimegatron.errors import MinimegatronError

from .text import named

STEPS = 10_000_000_000  # of all threads in one launch: more is a loop without an end
CHECKED_STEPS = 100_000_000  # in a check, whose cases are small
MOST_ARRAYS = 32
Grid = int | tuple[int, ...]
_ONE_LAUNCH = threading.Lock()  # in a process: arrays have fixed addresses
_NUMBERS: dict[str, Any] = {
    "bool": ctypes.c_bool, "int8": ctypes.c_int8, "uint8": ctypes.c_uint8, "int16": ctypes.c_int16,
    "uint16": ctypes.c_uint16, "int32": ctypes.c_int32, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64, "float32": ctypes.c_float, "float64": ctypes.c_double,
}  # fmt: skip
_SHOWN = {"float32": "float", "float64": "double", "int32": "int"}


class KernelError(MinimegatronError):
    """A kernel's arguments do not fit, or its launch failed."""


class LaunchError(KernelError):
    """A launch failed: an access out of bounds, a race, a barrier that not all threads meet. `line` is of the cell."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what, where=f"line {line} of the cell" if line else "", fix="mend the kernel, or its launch")
        self.line = line


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel.

    Attributes:
        kind: `number`, or of an array `input` (const) or `output`.
        dtype: of a number or of an array's elements, torch's name; `other` for a type that torch does not have.
    """

    name: str
    kind: str
    dtype: str


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


def parameters_of(library: ctypes.CDLL, names: Sequence[str]) -> list[Parameter]:
    """The parameters of a library's kernel, by what its compiler says of their types."""
    library.lab_signature.restype = ctypes.c_char_p
    kinds = library.lab_signature().decode().split(";")[:-1]
    known = {"c": "input", "*": "output", " ": "number"}
    return [Parameter(name, known[kind[0]], kind[1:]) for name, kind in zip(names, kinds, strict=True)]


class Emulator:
    """The library of one kernel.

    Args:
        path: path of the shared object.
        name: name of the kernel.
        names: of its parameters.
        source: its text, which begins on `line` of the cell.
    """

    def __init__(self, path: Path, name: str, names: Sequence[str], source: str, line: int) -> None:
        self.name, self.source, self.line = name, source, line
        self._c = ctypes.CDLL(str(path))
        self.parameters = parameters_of(self._c, names)
        self._c.lab_limit.argtypes = [ctypes.c_longlong, ctypes.c_int, ctypes.c_int]
        self._c.lab_array.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
        self._c.lab_launch.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_void_p]
        self._c.lab_message.restype = self._c.lab_note.restype = ctypes.c_char_p

    def launch(
        self, args: Sequence[Any], grid: Grid, block: Grid, *, shared_mem: int = 0, order: int = 0,
        steps: int = STEPS, quiet: bool = False,
    ) -> Launch:  # fmt: skip
        """Run `grid` blocks of `block` threads; `fitting` has checked the arguments.

        Args:
            shared_mem: bytes of dynamic shared memory.
            order: order of threads: 0 forward, 1 backward, n > 1 shuffled by seed n.
            steps: of all threads together (branches, turns of loops, calls), after which it is stopped.
            quiet: printf prints nothing.
        Raises:
            LaunchError: it failed.
        """
        with _ONE_LAUNCH:
            return self._launch(args, grid, block, shared_mem, order, steps, quiet)

    def _launch(
        self, args: Sequence[Any], grid: Grid, block: Grid, shared_mem: int, order: int, steps: int, quiet: bool
    ) -> Launch:
        arrays = [(p, a) for p, a in zip(self.parameters, args, strict=True) if isinstance(a, torch.Tensor)]
        self._c.lab_begin()
        for p, tensor in arrays:
            size = tensor.element_size()
            self._c.lab_array(p.name.encode(), tensor.data_ptr(), tensor.nbytes, size, p.kind == "input")
        begins = iter(self._placed(len(arrays)))
        values, keep = values_of(self.parameters, args, lambda tensor: next(begins))
        self._c.lab_limit(steps, quiet, order)
        try:
            error = self._c.lab_launch(values, three(grid), three(block), shared_mem, None)
        finally:
            self._c.lab_fetch()
        del keep
        numbers = (ctypes.c_longlong * (8 + 6 * len(arrays)))()
        self._c.lab_numbers(numbers)
        line, column, note_line, busiest, blocks, barriers, _, atomics, *rest = list(numbers)
        if error:
            said = self._c.lab_message().decode(errors="replace")
            if "?[" in said:
                said = said.replace("?[", f"{named(self.source, self.line, line, column)}[", 1)
            raise LaunchError(f"error {error}: {said}", line)
        threads = count_of(block)
        counts: dict[str, Any] = {
            "barriers": barriers / (blocks * threads), "atomics": atomics / blocks, "shared_loads": busiest,
        }  # fmt: skip
        writes = {}
        for i, (p, tensor) in enumerate(arrays):
            loads, read, sectors, stores, written, _ = rest[6 * i : 6 * i + 6]
            served = 32 * sectors
            counts[p.name] = {
                "loads": loads, "stores": stores, "read": read, "written": written, "served": served,
                "share": read / served if served else 0.0,
            }  # fmt: skip
            if p.kind == "output":
                writes[p.name] = torch.zeros(tensor.shape, dtype=torch.uint8)
                self._c.lab_writes(i, ctypes.c_void_p(writes[p.name].data_ptr()))
        note = self._c.lab_note().decode(errors="replace")
        return Launch(counts, writes, f"line {note_line}: {note}" if note else "")

    def _placed(self, arrays: int) -> list[int]:
        begins = (ctypes.c_void_p * max(1, arrays))()
        if not self._c.lab_place(begins):
            self._c.lab_fetch()
            raise LaunchError("there is no room for copies of the arrays: take smaller ones")
        return [begins[i] or 0 for i in range(arrays)]


def values_of(parameters: Sequence[Parameter], args: Sequence[Any], address: Any) -> tuple[Any, list[Any]]:
    """The arguments as CUDA wants them, an array of pointers to values; and what must be kept meanwhile."""
    keep: list[Any] = []
    for parameter, value in zip(parameters, args, strict=True):
        if parameter.kind == "number":
            keep.append(_number(parameter.dtype, value))
        else:
            keep.append(ctypes.c_void_p(None if value is None else address(value)))
    return (ctypes.c_void_p * max(1, len(keep)))(*(ctypes.addressof(one) for one in keep)), keep


def _number(dtype: str, value: Any) -> Any:
    if dtype in _NUMBERS:
        return _NUMBERS[dtype](value)
    bits = torch.tensor(float(value), dtype=getattr(torch, dtype)).view(torch.int16)
    return ctypes.c_int16(int(bits))


def count_of(size: Grid) -> int:
    """How many there are of (x, y, z)."""
    x, y, z = three(size)
    return int(x * y * z)


def three(size: Grid) -> Any:
    """(x, y, z) for a launcher."""
    whole = (size,) if isinstance(size, int) else tuple(size)
    return (ctypes.c_uint * 3)(*whole, *[1] * (3 - len(whole)))


def fitting(
    name: str, parameters: Sequence[Parameter], args: Sequence[Any], grid: Any, block: Any, shared_mem: Any = 0
) -> None:
    """Check arguments against the parameters.

    Raises:
        KernelError: one does not fit.
    """
    if len(args) != len(parameters):
        raise KernelError(f"{name} takes {len(parameters)} arguments, not {len(args)}")
    if sum(isinstance(value, torch.Tensor) for value in args) > MOST_ARRAYS:
        raise KernelError(f"{name}: at most {MOST_ARRAYS} arrays")
    for value, parameter in zip(args, parameters, strict=True):
        wrong = _wrong_number(value, parameter) if parameter.kind == "number" else _wrong_array(value, parameter)
        if wrong:
            raise KernelError(f"{name}: {parameter.name} {wrong}"[:200])
    for what, value, most in (("grid", grid, (1 << 31) - 1), ("block", block, 1024)):
        whole = value if isinstance(value, tuple) else (value,)
        right = 1 <= len(whole) <= 3 and all(type(one) is int and 1 <= one <= most for one in whole)
        if not right or count_of(value) > most:
            wanted = f"a number from 1 to {most}, or (x, y, z) of so many together"
            raise KernelError(f"{name}: {what} is {wanted}, got {value!r}"[:200])
    if type(shared_mem) is not int or not 0 <= shared_mem <= 227 << 10:
        raise KernelError(f"{name}: shared_mem is bytes, from 0 to 227 KiB, got {shared_mem!r}"[:200])


def _wrong_array(value: Any, parameter: Parameter) -> str:
    if value is None:
        return ""
    want = getattr(torch, parameter.dtype, None)
    if isinstance(value, torch.Tensor) and value.is_contiguous() and want in (None, value.dtype):
        return ""
    shown = f"{value.dtype}, strides {value.stride()}" if isinstance(value, torch.Tensor) else repr(value)
    return f"wants a contiguous tensor of {want or 'any dtype'}, got {shown}"


def _wrong_number(value: Any, parameter: Parameter) -> str:
    dtype = getattr(torch, parameter.dtype, None)
    if dtype is None:
        return "is of a type that a launch here cannot pass: pass numbers and arrays"
    shown = _SHOWN.get(parameter.dtype, parameter.dtype)
    if dtype == torch.bool:
        return "" if isinstance(value, bool) or value in (0, 1) else f"wants bool, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float if dtype.is_floating_point else int):
        return f"wants {shown}, got {value!r}"
    if dtype.is_floating_point:
        return "is no number of C++" if isinstance(value, int) and abs(value) >= 1 << 1000 else ""
    bounds = torch.iinfo(dtype)
    return "" if bounds.min <= value <= bounds.max else f"is an {shown} of {bounds.bits} bits, got {value!r}"
