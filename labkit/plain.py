"""Plain data: the only thing that crosses the border between a learner's process and the judge.

A pickle would let the sender run code in the receiver, and a live object can lie about itself (`__eq__` that is always
true). So an answer is written as JSON and read back strictly: numbers, strings, booleans, None, lists, dicts, tensors.

| value           | as JSON                                                                   |
|-----------------|---------------------------------------------------------------------------|
| list, tuple     | `[...]`; both come back as a list                                         |
| dict            | `{"dict": [[key, value], ...]}`, so that keys may be numbers or tuples    |
| torch.Tensor    | `{"tensor": [dtype, shape, base64 of the bytes]}`                         |
| numpy scalar    | the Python number                                                         |
| NaN, infinities | as JavaScript writes them; Python's `json` reads them back                |
"""

from __future__ import annotations

import base64
import json
import math
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


def dumps(value: Any) -> str:
    """JSON text of `value`, on one line.

    Raises:
        DataError: it holds something that is not plain data; the message says what and where.
    """
    return json.dumps(_encode(value, "answer", 0))


def loads(text: str | bytes) -> Any:
    """The value that `dumps` wrote; lists for tuples, fresh tensors on the CPU.

    Raises:
        DataError: the text is not what `dumps` writes.
    """
    try:
        return _decode(json.loads(text), 0)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"not plain data: {error}") from None


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise DataError(f"lists inside lists, more than {MAX_DEPTH} deep", where=path[:80])
    if isinstance(value, torch.Tensor):
        return {"tensor": _encode_tensor(value, path)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        pairs = [[_encode(k, path, depth + 1), _encode(v, f"{path}[{k!r}]", depth + 1)] for k, v in value.items()]
        return {"dict": pairs}
    if type(value).__module__ == "numpy":
        return _encode(value.item() if value.ndim == 0 else torch.from_numpy(value.copy()), path, depth + 1)
    raise DataError(
        f"{path} is a {type(value).__name__}, which a check cannot read",
        fix="return numbers, strings, lists, dicts or tensors",
    )


def _encode_tensor(tensor: torch.Tensor, path: str) -> list[Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise DataError(f"{path} is a tensor of {name}", fix=f"use one of {', '.join(DTYPES)}")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [name, list(tensor.shape), base64.b64encode(raw).decode()]


def _decode(value: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "tensor":
        return _decode_tensor(*content)
    if tag == "dict":
        return {_key(_decode(k, depth + 1)): _decode(v, depth + 1) for k, v in content}
    raise ValueError(f"unknown tag {tag!r}")


def _key(value: Any) -> Any:
    return tuple(_key(item) for item in value) if isinstance(value, list) else value


def _decode_tensor(name: str, shape: list[int], text: str) -> torch.Tensor:
    dtype = DTYPES[name]
    raw = bytearray(base64.b64decode(text, validate=True))
    if not all(type(size) is int and size >= 0 for size in shape) or len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a tensor of shape {shape} and dtype {name}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
