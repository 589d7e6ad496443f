"""What a pickle says, as plain data; nothing in it is imported, called or executed.

The problem in a sentence: a pickle is a program that is executed to be read, and `.metadata` of Megatron's checkpoints
is one.

A pickle is a list of instructions for a machine with a stack. `pickletools` of the standard library reads them without
running them; this is a machine that follows those which make data and knows no others. Where a pickle would look up a
class (GLOBAL), a name is noted. Where it would call something (REDUCE, NEWOBJ), a `Built` notes what would have been
called and with what.

    cposix                        GLOBAL   the name posix.system
    system                                 refused: not among the names that belong into such a file
    (S'echo owned'
    tR.                           REDUCE   would be Built("posix.system", ("echo owned",)), a note, nothing else

https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any

from minimegatron.errors import CheckpointError

_PUSHED = frozenset(
    "BININT BININT1 BININT2 INT LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES "
    "BINBYTES8 SHORT_BINSTRING BINSTRING".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict")


class Name(str):
    """A class or function by its dotted name."""

    __slots__ = ()


@dataclasses.dataclass(eq=False)
class Built:
    """An object that the pickle would have built.

    Attributes:
        name: what would have been called.
        args: with what.
        state: what it would have been given afterwards.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None

    def __getitem__(self, field: str) -> Any:
        """A field of its state."""
        return self.state[field]


class _Bad(Exception):
    pass


def read_pickle(data: bytes, where: str, known: Callable[[str], bool] = lambda name: True) -> Any:
    """The data of a pickle.

    Args:
        data: all of it.
        where: for the error.
        known: which names may be in it. Where all are, nothing happens with those that are strange either.

    Raises:
        CheckpointError: it names something else, has an instruction that makes no data, or is broken.
    """
    try:
        return _Machine(known).run(data)
    except _Bad as error:
        what = str(error)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"is broken: {str(error)[:80]}"
    raise CheckpointError(f"the pickle {what}", where=where, fix="take another copy of the checkpoint") from None


class _Machine:
    def __init__(self, known: Callable[[str], bool]) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for code, arg, _ in pickletools.genops(data):
            name = code.name
            if name == "STOP":
                return self.stack.pop()
            if name in _PUSHED:
                self.stack.append(arg)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name not in ("PROTO", "FRAME"):
                act = getattr(self, f"_{name.lower()}", None)
                if act is None:
                    raise _Bad(f"has the instruction {name}, which makes no data")
                act(arg)
        raise _Bad("ends before its end")

    def _above_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def _named(self, name: str) -> None:
        if not self.known(name):
            raise _Bad(f"names {name[:100]}, which does not belong here")
        self.stack.append(Name(name))

    def _global(self, arg: str) -> None:
        self._named(arg.replace(" ", "."))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._named(f"{module}.{name}")

    def _reduce(self, _: Any) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise _Bad("calls what is no name")
        self.stack.append({} if called in _MAPPINGS else Built(str(called), args))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Built):
            raise _Bad("gives a state to what is no object")
        target.state = state

    def _binpersid(self, _: Any) -> None:
        self.stack.append(Built("persistent", (self.stack.pop(),)))

    def _mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._above_mark()))

    def _last(self, count: int) -> None:
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def _tuple1(self, _: Any) -> None:
        self._last(1)

    def _tuple2(self, _: Any) -> None:
        self._last(2)

    def _tuple3(self, _: Any) -> None:
        self._last(3)

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _empty_set(self, _: Any) -> None:
        self.stack.append(set())

    def _append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._above_mark())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _Bad("appends to what is no list")
        self.stack[-1].extend(values)

    def _additems(self, _: Any) -> None:
        values = self._above_mark()
        if not isinstance(self.stack[-1], set):
            raise _Bad("adds to what is no set")
        self.stack[-1].update(values)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self, _: Any) -> None:
        self._update(self._above_mark())

    def _update(self, pairs: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(pairs) % 2:
            raise _Bad("sets items of what is no table")
        self.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _binput(self, arg: int) -> None:
        self.memo[arg] = self.stack[-1]

    _long_binput = _binput

    def _binget(self, arg: int) -> None:
        self.stack.append(self.memo[arg])

    _long_binget = _binget
