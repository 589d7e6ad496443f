"""Files of tensors whose headers say what is not so, as many as there are seeds.

Their size is that of a small file's header; those of `largest` are at the limits.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any


def good(dice: random.Random) -> dict[str, Any]:
    """A header, of tensors of 1 to 3 dims."""
    header: dict[str, Any] = {"__metadata__": {"step": "1", "run_id": "r"}}
    at = 0
    for i in range(dice.randint(1, 5)):
        shape = [dice.randint(1, 4) for _ in range(dice.randint(1, 3))]
        size = 4
        for n in shape:
            size *= n
        header[f"t{i}"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


HUGE = [2**31, 2**62, 2**63, 2**64, 10**40, -1, -(2**63), 0.5, 1e300, None, True, "3", [], {}]


def entry_lies(header: dict[str, Any], dice: random.Random) -> None:
    """One number, name or type of one tensor."""
    name = dice.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    field = dice.choice(["dtype", "shape", "data_offsets"])
    how = dice.randrange(4)
    if how == 0:
        del entry[field]
    elif how == 1:
        entry[field] = dice.choice([None, 7, "F33", [1] * 9, {"a": 1}, ["x"], [[1]], 1.5, False])
    elif field == "dtype":
        entry[field] = dice.choice(["F64", "U8", "F16", "f32", "", "I128"])
    else:
        at = dice.randrange(len(entry[field]))
        before = entry[field][at]
        entry[field][at] = dice.choice([before + 1, before - 1, before + 4, *HUGE])


def text_lies(text: bytes, dice: random.Random) -> bytes:
    how = dice.randrange(8)
    if how == 0:
        return text[: dice.randrange(len(text))]
    if how == 1:
        return b"[" * dice.randint(1, 100_000) + text
    if how == 2:
        return text.replace(b'"t0"', b'"t0":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"t0"', 1)
    if how == 3:
        return text.replace(
            b"[0,", dice.choice([b"[NaN,", b"[Infinity,", b"[-0.0,", b"[" + b"9" * 5000 + b",", b"[[0],"]), 1
        )
    if how == 4:
        return text.replace(b'"step":"1"', b'"step":' + dice.choice([b"1", b"null", b"{}", b'["1"]']))
    if how == 5:
        return dice.choice([b"", b"null", b"3", b'"x"', b"[]", b"\xff\xfe" + text, b"\x80\x04" + text])
    if how == 6:
        return text.replace(b"}", b"", 1)
    more = ",".join(f'"x{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(dice.randint(1, 99)))
    return text[:-1] + b',"__metadata__":{},' + more.encode() + b"}"


def lie(dice: random.Random) -> bytes:
    """A file whose header says something that is not so."""
    header = good(dice)
    ends = [e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"]
    data = dice.randbytes(max(ends))
    kind = dice.randrange(4)
    if kind == 0:
        entry_lies(header, dice)
    text = json.dumps(header, separators=(",", ":")).encode()
    if kind == 1:
        text = text_lies(text, dice)
    length = len(text)
    if kind == 2:
        length = dice.choice([0, 1, length - 1, length + 1, len(data) + length + 1, 2**24 + 1, 2**31, 2**63, 2**64 - 1])
    if kind == 3:
        data = data[: dice.randrange(len(data))] if dice.random() < 0.5 else data + dice.randbytes(dice.randint(1, 9))
    return struct.pack("<Q", length) + text + data


def largest() -> dict[str, bytes]:
    """Headers at the limits of what is read at all, each with a lie."""
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    last = b'"x":{"dtype":"F32","shape":[0],"data_offsets":[0,4]}}'
    tables = {f"{n} tensors": b"{" + b"".join(entry % i for i in range(n)) + last for n in (150_000, 99_000)}
    files = {name: struct.pack("<Q", len(table)) + table for name, table in tables.items()}
    return files | {"16 MiB of brackets": struct.pack("<Q", 1 << 24) + b"[" * (1 << 24)}
