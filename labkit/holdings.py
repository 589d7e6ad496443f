"""Counts the memory that a learner's objects hold in any form, beside tensors that an operation made.

`OpRecorder` sees each tensor that an operation makes. It does not see a numpy array, bytes, a list of numbers, or a
tensor over an array (`torch.from_numpy`). So `alive` counts the tensors that operations made and that still exist, and
everything that can be reached, attribute by attribute, from the learner's modules and from the inputs:

| found                                          | counts                                                          |
|------------------------------------------------|-----------------------------------------------------------------|
| tensor, numpy array, bytes, bytearray, `array` | the bytes of its memory, once however many views there are      |
| numbers in a list, tuple, dict, set, object    | 4 bytes each, as in a tensor; large ints their bytes            |
| text of 1024 characters or more                | a byte a character                                              |

Not followed: modules, classes and functions of others, and the judge's own objects. An attribute that a program adds to
a foreign module (`torch.mine = state`) is not found.
"""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

NUMBER, TEXT = 4, 1024  # bytes of one; characters below which a text is a name
MOST = 200_000  # objects that are looked at
_OWN = "exercises"  # the package of the learner's modules
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_FOREIGN = (types.ModuleType, types.FrameType, types.CodeType)
_NUMBERS = (int, float, complex, numpy.generic)
_PLAIN = (*_NUMBERS, str, type(None))


@dataclasses.dataclass
class Holdings:
    """The memory that was reached.

    Attributes:
        memory: {address: bytes} of buffers, each counted once.
        numbers: {id of a container: bytes of the numbers and texts in it}.
    """

    memory: dict[int, int] = dataclasses.field(default_factory=dict)
    numbers: dict[int, int] = dataclasses.field(default_factory=dict)

    def beyond(self, *others: Holdings) -> int:
        """Bytes of it that are in none of the others: buffers outside of theirs, containers by as much as they grew."""
        known = [(at, at + size) for other in others for at, size in other.memory.items()]
        total = end = 0
        for at, size in sorted(self.memory.items()):
            if not any(low <= at < high for low, high in known):
                total += max(0, at + size - max(at, end))
                end = max(end, at + size)
        before = {key: size for other in others for key, size in other.numbers.items()}
        return total + sum(max(0, size - before.get(key, 0)) for key, size in self.numbers.items())


def reached(roots: Iterable[Any], counted: Callable[[torch.UntypedStorage], bool] = lambda _: False) -> Holdings:
    """All memory that `roots` hold, themselves included.

    Args:
        counted: whether a tensor's storage has been counted already.
    """
    found, seen, left = Holdings(), dict[int, Any](), list(roots)
    while left and len(seen) < MOST:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # it must not die, and its number become another's
        inside = _inside(one, found, counted)
        if much := sum(map(_of_number, inside)):
            found.numbers[id(one)] = much
        left += [item for item in inside if not issubclass(type(item), _PLAIN)]
    return found


def _of_number(value: Any) -> int:
    kind = type(value)
    if kind is str:
        return len(value) if len(value) >= TEXT else 0
    if kind is bool or not issubclass(kind, _NUMBERS):
        return 0
    return max(NUMBER, value.bit_length() // 8) if kind is int else NUMBER


def _inside(one: Any, found: Holdings, counted: Callable[[torch.UntypedStorage], bool]) -> list[Any]:
    """Objects to visit next; the memory of a buffer is counted."""
    kind = type(one)
    if issubclass(kind, types.ModuleType) and one.__name__.partition(".")[0] == _OWN:
        return _values(vars(one))
    if issubclass(kind, type):
        return _values(vars(one)) if _is_own(one) else []
    if issubclass(kind, types.FunctionType):
        made = (one.__closure__, one.__defaults__, one.__kwdefaults__, vars(one))
        return [part for part in made if part] if _is_own(one) else []
    if issubclass(kind, _FOREIGN) or str(kind.__module__).partition(".")[0] == "labkit":
        return []
    if kind is dict and "__spec__" in one and "__builtins__" in one:  # the names of a module
        return []
    if issubclass(kind, torch.Tensor):
        return [*_of_storage(one, found, counted), *gc.get_referents(one)]
    if issubclass(kind, _STORAGES):
        return _of_storage(one, found, counted)
    if issubclass(kind, numpy.ndarray):
        return _of_array(one, found)
    return _of_buffer(one, found) or gc.get_referents(one)


def _values(names: Any) -> list[Any]:
    """The attributes of a module or a class, without docstrings and the like."""
    return [value for name, value in names.items() if not (name.startswith("__") and name.endswith("__"))]


def _is_own(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] == _OWN


def _of_storage(one: Any, found: Holdings, counted: Callable[[torch.UntypedStorage], bool]) -> list[Any]:
    try:
        storage = one if isinstance(one, torch.UntypedStorage) else one.untyped_storage()
        if not counted(storage):
            _note(found, storage.data_ptr(), storage.nbytes())
    except (NotImplementedError, RuntimeError):  # a tensor without memory of its own: sparse, a wrapper
        pass
    return []


def _of_array(one: Any, found: Holdings) -> list[Any]:
    """The base of an array's view."""
    if one.base is not None:
        return [one.base]
    _note(found, one.__array_interface__["data"][0], one.nbytes)
    return list(one.flat) if one.dtype.hasobject else []


def _of_buffer(one: Any, found: Holdings) -> list[Any]:
    """The object whose memory any other buffer shows, if it says so."""
    try:
        view = memoryview(one)
    except Exception:
        return []
    under = view.obj
    if under is not None and under is not one:
        return [under]
    try:
        _note(found, numpy.frombuffer(view, numpy.uint8).__array_interface__["data"][0], view.nbytes)
    except (ValueError, TypeError):  # empty, or not in one piece
        _note(found, id(one), view.nbytes)
    return []


def _note(found: Holdings, address: int, nbytes: int) -> None:
    if nbytes:
        found.memory[address] = max(found.memory.get(address, 0), nbytes)
