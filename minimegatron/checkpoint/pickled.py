"""The contents of a pickle as plain data; nothing in it is imported, called or executed.

The problem in a sentence: reading a pickle means executing a program, and `.metadata` of Megatron's checkpoints is one.

Python's own unpickler runs its instructions, with one change: where a pickle looks up a class or function, it gets a
stand-in of this module with its dotted name. Each object that the pickle then builds, or each call, becomes a `Built`:
the name, the arguments, the state.

    cposix                        GLOBAL   the name posix.system
    system                                 refused: not among the names that belong into such a file
    (S'echo owned'
    tR.                           REDUCE   would be Built "posix.system" with ("echo owned",), plain data

It is the unpickler in Python, not the one in C: that one allocates memory for any number that a damaged file gives.

https://docs.python.org/3/library/pickle.html#restricting-globals
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from minimegatron.errors import CheckpointError

_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict")


class Name(type):
    """A stand-in for a class or function; `str` is its dotted name."""

    def __str__(cls) -> str:
        return cls.__name__


class Built(metaclass=Name):
    """An object that the pickle would have built.

    Attributes:
        name: name of the class or function.
        args: its arguments.
        state: the state that would have been set afterwards.
    """

    name: str
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Built:
        self = super().__new__(cls)
        self.name, self.args, self.state = str(cls), args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        """A field of its state."""
        return self.state[field]


class _Unpickler(pickle._Unpickler):  # type: ignore[misc, name-defined]
    def __init__(self, data: bytes, known: Callable[[str], bool]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        if not self._known(dotted):
            raise pickle.UnpicklingError(f"names {dotted[:100]}, which does not belong here")
        return (lambda *args: {}) if dotted in _MAPPINGS else Name(dotted, (Built,), {})

    def persistent_load(self, pid: Any) -> Any:
        return Name("persistent", (Built,), {})(pid)


def read_pickle(data: bytes, where: str, known: Callable[[str], bool] = lambda name: True) -> Any:
    """The data of a pickle.

    Args:
        data: all of it.
        where: for the error.
        known: whether a name may be in it; default every name, as none is executed.

    Raises:
        CheckpointError: it has another name, or is broken.
    """
    try:
        return _Unpickler(data, known).load()
    except Exception as error:  # whatever a damaged file leads to
        what = str(error) if "does not belong here" in str(error) else f"is broken: {str(error)[:80]}"
        raise CheckpointError(f"the pickle {what}", where=where, fix="take another copy of the checkpoint") from None
