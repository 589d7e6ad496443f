"""The last calls of a rank in memory that outlives it, so that the others can read them when it has been killed.

The problem in a sentence: gloo ends a process by `abort` when a message has not the expected size, and a rank that is
killed or stopped hands in no record; each of them is the one rank of which one would like to know what it was doing.

A page of shared memory, which other processes of the machine map while the rank lives (`/proc/PID/fd/N`), has

    slots   the last `SLOTS` calls as numbers: place in order, group, number there, operation, dtype, sizes, line, time
    texts   what the numbers stand for: a line for each group, operation and code object when it is first seen

so a call costs one `struct.pack_into`, about a microsecond. Only Linux has `memfd_create`; elsewhere there is no page.
"""

from __future__ import annotations

import mmap
import os
import struct
from types import CodeType
from typing import Any

import torch

SLOTS, DIMS = 16, 4
_SLOT = struct.Struct(
    f"<q8iq{DIMS}q"
)  # record + 1, group, number, op, dtype, message, code, line, dims, created, sizes
_TEXTS = SLOTS * _SLOT.size + 8
PAGE_BYTES = 1 << 16
_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "int8", "int16")
)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}


class LastCalls:
    """The page of this rank.

    Attributes:
        where: `PID:FD`, by which `read` finds it.
    """

    def __init__(self) -> None:
        fd = os.memfd_create("minimegatron-last-calls")
        os.ftruncate(fd, PAGE_BYTES)
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self.where = f"{os.getpid()}:{fd}"
        self._end = _TEXTS
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, kind: str, *text: object) -> int:
        """The number of a group, an operation or a code object; its text is written when it is first asked for."""
        number = self._numbers.get(key)
        if number is None:
            line = "\t".join([kind, str(len(self._numbers)), *map(str, text)]).replace("\n", " ") + "\n"
            data = line.encode(errors="replace")
            if self._end + len(data) > PAGE_BYTES:
                return -1  # the page is full: what it stands for is not known
            self._page[self._end : self._end + len(data)] = data
            self._end += len(data)
            struct.pack_into("<q", self._page, _TEXTS - 8, self._end)
            number = self._numbers[key] = len(self._numbers)
        return number

    def note(self, entry: Any, code: CodeType, line: int) -> None:
        """Write a call (`comm/flight_recorder.Entry`) over the oldest one."""
        group, tensor = entry.group, entry.sent or entry.received
        sizes, dtype = (tensor[0][:DIMS], _NUMBER_OF.get(tensor[1], -1)) if tensor else ((), -1)
        own = -1 if entry.message is None else int(entry.sends)
        _SLOT.pack_into(
            self._page,
            (entry.record % SLOTS) * _SLOT.size,
            entry.record + 1,
            self.number(group, "group", group.name, group.desc, group.backend, *group.ranks),
            entry.seq,
            self.number((entry.op, entry.axis.name, entry.extra), "op", entry.op, entry.axis.name, entry.extra),
            dtype,
            own,
            self.number(code, "code", code.co_filename, code.co_name),
            line,
            len(sizes),
            entry.created,
            *sizes,
            *(0,) * (DIMS - len(sizes)),
        )


class Page:
    """The page of another rank of this machine, mapped while it lives."""

    def __init__(self, where: str) -> None:
        pid, fd = where.split(":")
        with open(f"/proc/{int(pid)}/fd/{int(fd)}", "rb") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)

    def calls(self) -> list[dict[str, Any]]:
        """Its last calls, oldest first: record, group (name, desc, backend, ranks), number, op, axis, extra, shape,
        dtype, sends (None for a collective), place (filename, line, name), created."""
        (end,) = struct.unpack_from("<q", self._page, _TEXTS - 8)
        lines = self._page[_TEXTS : max(end, _TEXTS)].decode(errors="replace").splitlines()
        texts = {int(fields[1]): fields[2:] for fields in (line.split("\t") for line in lines)}
        found = []
        for slot in range(SLOTS):
            record, group, seq, op, dtype, own, code, line, dims, created, *sizes = _SLOT.unpack_from(
                self._page, slot * _SLOT.size
            )
            if not (record and group in texts and op in texts):
                continue
            name, desc, backend, *ranks = texts[group]
            filename, function = texts.get(code, ["", ""])
            found.append({
                "record": record - 1, "group": (name, desc, backend, tuple(map(int, ranks))), "number": seq,
                "op": texts[op][0], "axis": texts[op][1], "extra": texts[op][2],
                "shape": sizes[:dims] if dtype >= 0 else None, "dtype": _DTYPES[dtype] if dtype >= 0 else None,
                "sends": None if own < 0 else bool(own), "place": (filename, line, function), "created": created,
            })  # fmt: skip
        return sorted(found, key=lambda call: call["record"])  # type: ignore[no-any-return, arg-type]
