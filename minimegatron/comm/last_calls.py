"""The last calls of a rank in memory that outlives it, so that the others can read them when it has been killed.

The problem in a sentence: gloo ends a process by `abort` when a message has not the expected size, and a rank that is
killed or stopped hands in no record; each of them is the one rank of which one would like to know what it was doing.

A page of shared memory, which other processes of the machine map while the rank lives (`/proc/PID/fd/N`), has

    slots   the last `SLOTS` calls: place among all calls, number in the group, kind, time
    kinds   what a call is, a line of text when it is first seen: group, operation, shape, dtype, line of code

A training repeats its calls in every step, so it has a few hundred kinds, and a call costs a look into a dict and one
`struct.pack_into`. Only Linux has `memfd_create`; elsewhere there is no page.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from types import FrameType
from typing import Any

SLOTS = 16
PAGE_BYTES = 1 << 18
_SLOT = struct.Struct("<4q")  # place among all calls + 1, number in the group, kind, nanoseconds
_END = struct.Struct("<q")
_KINDS = SLOTS * _SLOT.size + _END.size


class LastCalls:
    """The page of this rank.

    Attributes:
        where: `PID:FD`, by which `Page` finds it.
    """

    def __init__(self) -> None:
        fd = os.memfd_create("minimegatron-last-calls")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, PAGE_BYTES)
        self._page = mmap.mmap(fd, PAGE_BYTES)
        self.where = f"{os.getpid()}:{fd}"
        self._end = _KINDS
        self._kinds: dict[Any, int] = {}

    def note(self, entry: Any, caller: FrameType) -> None:
        """Write a call (`comm/flight_recorder.Entry`) over the oldest one."""
        code, line = caller.f_code, caller.f_lineno
        key = (entry.group, entry.op, entry.axis.name, entry.extra, entry.sent or entry.received, code, line)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._add(entry, code.co_filename, line, code.co_name)
        slot = entry.record % SLOTS * _SLOT.size
        _SLOT.pack_into(self._page, slot, entry.record + 1, entry.seq, kind, entry.created)

    def _add(self, entry: Any, filename: str, line: int, name: str) -> int:
        """Write a kind; returns its offset, or 0 where there is no room: then such calls are not known."""
        group, tensor = entry.group, entry.sent or entry.received
        shape, dtype = ("x".join(map(str, tensor[0])), str(tensor[1])) if tensor else ("", "")
        own = "" if entry.message is None else "send" if entry.sends else "receive"
        ranks = " ".join(map(str, group.ranks))
        fields = (
            group.name,
            group.desc,
            group.backend,
            ranks,
            entry.op,
            entry.axis.name,
            entry.extra,
            own,
            shape,
            dtype,
        )
        text = "\t".join([*fields, filename, str(line), name]).replace("\n", " ") + "\n"
        data, begin = text.encode(errors="replace"), self._end
        if begin + len(data) > PAGE_BYTES:
            return 0
        self._end += len(data)
        self._page[begin : self._end] = data
        _END.pack_into(self._page, _KINDS - _END.size, self._end)
        return begin


class Page:
    """The page of another rank of this machine, mapped while it lives."""

    def __init__(self, where: str) -> None:
        pid, fd = where.split(":")
        with open(f"/proc/{int(pid)}/fd/{int(fd)}", "rb") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)

    def calls(self) -> list[dict[str, Any]]:
        """Its last calls, oldest first: record, group (name, desc, backend, ranks), number, op, axis, extra, shape and
        dtype (None where there is no tensor), sends (None for a collective), place (filename, line, name), created."""
        (end,) = _END.unpack_from(self._page, _KINDS - _END.size)
        found = []
        for slot in range(SLOTS):
            record, number, kind, created = _SLOT.unpack_from(self._page, slot * _SLOT.size)
            if not (record and _KINDS <= kind < end):
                continue
            fields = self._page[kind:end].partition(b"\n")[0].decode(errors="replace").split("\t")
            name, desc, backend, ranks, op, axis, extra, own, shape, dtype, filename, line, function = fields
            found.append({
                "record": record - 1, "group": (name, desc, backend, tuple(map(int, ranks.split()))), "number": number,
                "op": op, "axis": axis, "extra": extra, "dtype": dtype or None,
                "shape": [int(size) for size in shape.split("x") if size] if dtype else None,
                "sends": {"send": True, "receive": False}.get(own), "place": (filename, int(line), function),
                "created": created,
            })  # fmt: skip
        return sorted(found, key=lambda call: call["record"])  # type: ignore[no-any-return, arg-type]
