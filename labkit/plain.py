"""Plain data: the only thing that crosses the border between a learner's process and the judge.

A pickle would let the sender run code in the receiver, and a live object can lie about itself (`__eq__` that is always
true). So an answer is written as JSON and read back strictly: numbers, strings, booleans, None, lists, dicts, tensors.

| value                                          | as JSON                                                           |
|------------------------------------------------|-------------------------------------------------------------------|
| list, tuple, range, views of a dict, iterators | `[...]`; all come back as a list                                  |
| dict                                           | `{"dict": [[key, value], ...]}`; keys may be numbers, tuples      |
| torch.Tensor, numpy.ndarray                    | `{"tensor": [dtype, shape, base64 of the bytes]}`                 |
| numpy scalar                                   | the Python number                                                 |
| Fraction, Decimal                              | an int if it is whole, else the nearest float                     |
| NaN, infinities                                | as JavaScript writes them; Python's `json` reads them back        |

A set has no order and is refused with that reason, as is everything that is not in the table. Both sides are bounded:
`settled`, which `dumps` calls, reports what is too much, in words for the answer's author; `loads` counts values before
it makes objects (`bounded_json`), because a malicious sender does not use `dumps`.

An iterator runs the learner's code when it is read. `settled` reads all of them, for a caller that still records
what that code does.
"""

from __future__ import annotations

import base64
import decimal
import fractions
import json
import math
import socket
import struct
import sys
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from typing import Any

import torch

from minimegatron.errors import DataError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
MAX_DEPTH = 32
_OWN_DEPTH = 2 * MAX_DEPTH  # of our own data, which holds answers
MAX_VALUES = 200_000  # of one answer; a tensor is a handful, whatever its size
MAX_REPLY = 300_000  # of what a process sends: the answer, and what it did
MAX_ITEMS = 100_000  # of an iterator, which may have no end
MAX_BITS = 13_000  # of an int: Python's json reads 4300 digits
MAX_TENSOR = 256 << 20
MAX_DIMS = 32
MAX_EMPTY = 1 << 20  # rows of a tensor without numbers: a list of them costs memory all the same
_MAX_KEY = 1 << 60  # larger ints can be chosen so that all have one hash, and a dict of them takes hours
_WORD = 1 << 64
NEXT = b"\x1e"  # behind each of several values on a line; JSON has no such character
_ATOMS = {bool, int, float, str, type(None)}
_BYTES = str | bytes | bytearray | memoryview
_WANTED = "return numbers, strings, lists, dicts or tensors"


def dumps(value: Any, most: int | None = MAX_VALUES) -> str:
    """JSON text of `value`, on one line.

    Args:
        value: an answer.
        most: values it may hold; None for data of our own.
    Raises:
        DataError: it holds something that is not plain data, or too much; the message says what and where.
    """
    return json.dumps(_encode(settled(value, most)))


def loads(text: str | bytes, most: int | None = MAX_REPLY) -> Any:
    """The value that `dumps` wrote; lists for tuples, fresh tensors on the CPU.

    Args:
        text: JSON in UTF-8.
        most: values it may hold; None for a text of our own.
    Raises:
        DataError: the text is not what `dumps` writes.
    """
    try:
        return _decode(bounded_json(text, most), 0)
    except Exception as error:  # torch raises of many classes for a shape that no tensor can have
        raise DataError(f"not plain data: {str(error)[:200]}") from None


def settled(value: Any, most: int | None = MAX_VALUES) -> Any:
    """The value in numbers, strings, lists, dicts and tensors of Python and torch themselves; iterators are read.

    Raises:
        DataError: as `dumps`.
    """
    return _Settling(most).settle(value, (), 0)


class _Settling:
    """One pass over an answer, which counts what it reads: a list may hold itself, or one list a thousand times."""

    def __init__(self, most: int | None) -> None:
        self.most, self.values = most, 0
        self.deepest = MAX_DEPTH if most is not None else _OWN_DEPTH

    def settle(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        self.values += 1
        if self.most is not None and self.values > self.most:
            raise DataError(f"the answer holds more than {self.most:,} values; return a tensor")
        if depth > self.deepest:
            raise DataError(f"{_place(path)}: lists inside lists, more than {self.deepest} deep")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, torch.Tensor):
            _refuse_tensor(value, path)
            return value.trigger_wait() if hasattr(value, "trigger_wait") else value  # of a functional collective
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise DataError(
                    f"{_place(path)} is an integer of more than {MAX_BITS:,} bits, which a check cannot read"
                )
            return value
        if isinstance(value, Mapping):
            return {
                _key(self.settle(key, path, depth + 1)): self.settle(item, (*path, key), depth + 1)
                for key, item in value.items()
            }
        if type(value) in (list, tuple) and _is_flat(value) and self.values + len(value) <= (self.most or sys.maxsize):
            self.values += len(value)
            return list(value)
        if isinstance(value, Iterator):
            return self._read(value, path, depth)
        if isinstance(value, Sequence | KeysView | ValuesView | ItemsView) and not isinstance(value, _BYTES):
            return [self.settle(item, (*path, i), depth + 1) for i, item in enumerate(value)]
        return self.settle(_simpler(value, path), path, depth + 1)

    def _read(self, values: Iterator[Any], path: tuple[Any, ...], depth: int) -> list[Any]:
        found = []
        for i, item in enumerate(values):
            if i == MAX_ITEMS:
                raise DataError(f"{_place(path)} is a {type(values).__name__} of more than {MAX_ITEMS:,} items")
            found.append(self.settle(item, (*path, i), depth + 1))
        return found


def _is_flat(values: Any) -> bool:
    """Whether it has only Python's own numbers and texts, none of them huge, so that no element needs to be visited."""
    kinds = set(map(type, values))
    return kinds <= _ATOMS and (int not in kinds or all(-_WORD < item < _WORD for item in values if type(item) is int))


def _place(path: tuple[Any, ...]) -> str:
    return "answer" + "".join(f"[{repr(step)[:40]}]" for step in path[:6]) + ("[...]" if len(path) > 6 else "")


def _simpler(value: Any, path: tuple[Any, ...]) -> Any:
    """A number or a tensor in place of a value of a library's own type.

    Raises:
        DataError: there is none.
    """
    kind, why = type(value).__name__, _WANTED
    try:
        if isinstance(value, fractions.Fraction):
            return value.numerator if value.denominator == 1 else float(value)
        if isinstance(value, decimal.Decimal):
            small = value.is_finite() and value.adjusted() < MAX_BITS // 4
            if value.is_finite() and math.isinf(float(value)) and not small:
                raise OverflowError("it is too large")
            return int(value) if small and value == value.to_integral_value() else float(value)
        if type(value).__module__ == "numpy":
            return _of_numpy(value)
    except (OverflowError, ValueError, TypeError, RuntimeError) as error:
        why = str(error)
    if isinstance(value, Set):
        why = "return a list, not a set, which has no order"
    raise DataError(f"{_place(path)} is a {kind}, which a check cannot read: {why}")


def _encode(value: Any) -> Any:
    """The output of `settled` as JSON values."""
    if isinstance(value, torch.Tensor):
        return {"tensor": _encode_tensor(value)}
    if isinstance(value, list):
        return value if _is_flat(value) else [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_encode(list(key) if isinstance(key, tuple) else key), _encode(item)]
                         for key, item in value.items()]}  # fmt: skip
    return value


def _of_numpy(value: Any) -> Any:
    """The value of an array or a scalar of NumPy, which need not be installed."""
    if value.dtype.kind not in "biuf":  # complex numbers, dates, texts, objects
        if value.ndim == 0:
            raise TypeError(f"its dtype is {value.dtype}")
        return value.tolist()
    if value.ndim == 0:
        return bool(value) if value.dtype.kind == "b" else float(value) if value.dtype.kind == "f" else int(value)
    name = value.dtype.name
    wider = {"uint16": "int64", "uint32": "int64", "longdouble": "float64"}.get(name, name)
    if wider == "uint64":
        return value.tolist()
    return torch.from_numpy(value.astype("float64" if value.dtype.itemsize > 8 else wider).copy())


def _refuse_tensor(tensor: torch.Tensor, path: tuple[Any, ...]) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    size = tensor.numel() * tensor.element_size()
    if name not in DTYPES:
        raise DataError(f"{_place(path)} is a tensor of {name}; a check reads {', '.join(DTYPES)}")
    if size > MAX_TENSOR:
        raise DataError(f"{_place(path)} is a tensor of {-(-size >> 20)} MiB; at most {MAX_TENSOR >> 20} are read")
    if not _bounded(tensor.shape):
        raise DataError(
            f"{_place(path)} is a tensor of the shape {list(tensor.shape)!s:.80}, which a check cannot read"
        )
    if tensor.is_meta:
        raise DataError(f"{_place(path)} is a tensor on the meta device, which has no numbers")


def _bounded(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be processed: 10**9 rows of no numbers take no bytes and 64 GB as a list."""
    return len(shape) <= MAX_DIMS and (0 not in shape or math.prod(size or 1 for size in shape) <= MAX_EMPTY)


def _encode_tensor(tensor: torch.Tensor) -> list[Any]:
    dense = tensor.detach().cpu()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    # As strided: a tensor of one number is contiguous with any stride, and only stride 1 can be seen as bytes.
    raw = dense.contiguous().as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(raw).decode()]


def _decode(value: Any, depth: int) -> Any:
    if depth > 3 * _OWN_DEPTH:  # a dict is three levels of JSON
        raise ValueError("too deep")
    if isinstance(value, list):
        return value if _is_flat(value) else [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "tensor":
        return _decode_tensor(*content)
    if tag == "dict":
        return {_key(_decode(k, depth + 1)): _decode(v, depth + 1) for k, v in content}
    raise ValueError(f"unknown tag {tag!r:.40}")


def _key(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MAX_KEY:
        raise DataError("the answer holds a dict with a key beyond 2**60, which a check cannot read")
    return tuple(_key(item) for item in value) if isinstance(value, list) else value


def _decode_tensor(name: str, shape: list[int], text: str) -> torch.Tensor:
    dtype = DTYPES[name]
    raw = bytearray(base64.b64decode(text, validate=True))
    if not all(type(size) is int and size >= 0 for size in shape) or len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a tensor of shape {shape!s:.80} and dtype {name}")
    if not _bounded(shape):
        raise ValueError(f"a tensor of the shape {shape!s:.80}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def confer(control: socket.socket, question: Any) -> Any:
    """Ask the judge a question from a process of its own (`Nursery.confer`); both trust each other.

    Raises:
        OSError: the judge has hung up.
    """
    send(control, question)
    return receive(control)


def send(sock: socket.socket, value: Any) -> None:
    """Send plain data, after the number of its bytes."""
    text = dumps(value, most=None).encode()
    sock.sendall(struct.pack("!Q", len(text)))
    sock.sendall(text)


def receive(sock: socket.socket) -> Any:
    """Receive what `send` sent.

    Raises:
        OSError: the other side has hung up, or the socket's deadline has passed.
    """
    (size,) = struct.unpack("!Q", _exactly(sock, 8))
    return loads(_exactly(sock, size), most=None)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(1 << 20, size - len(data)))
        if not part:
            raise ConnectionError("the other side has hung up")
        data += part
    return bytes(data)


def values_in(text: str, enough: int) -> int:
    """An upper bound on the values and keys that `json.loads` makes of a text; beyond `enough`, any larger number."""
    plain = text.replace("\\\\", "").replace('\\"', "") if "\\" in text else text
    if (strings := plain.count('"') // 2) > enough:
        return strings
    outside = "".join(plain.split('"')[::2])
    return 1 + sum(outside.count(sign) for sign in ",:[{")


def bounded_json(text: str | bytes, most: int | None) -> Any:
    """The value of a JSON text of strangers, in UTF-8.

    `json.loads` turns each `[]`, two characters, into an object of 56 bytes: 12 MiB of `[],[],` take over a second and
    half a gigabyte. So the values are counted in the text before it is parsed: outside of strings, each but the first
    follows a comma, a colon or an opening bracket. All steps run in C over the whole text.

    Args:
        most: the most values that it may have; None for a text of our own.
    Raises:
        ValueError: it is not JSON, or has too many values, nested lists or digits.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    if most is not None and (found := values_in(text, most)) > most:
        raise ValueError(f"it may hold {found:,} values; at most {most:,} are read")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists inside lists without end") from None
