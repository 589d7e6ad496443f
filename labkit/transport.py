"""torch.distributed inside the broker: every collective and message of a check is matched, computed and logged.

    rank                                          transport
      |-- start all_reduce of group "0", bytes ---->|  the k-th call of the group on this rank
      |   (computes)                                |  when every member has made its k-th: the result
      |-- wait ------------------------------------>|  logged: started as number 17, waited for as 23
      |<----------------------------------- result -|

A rank gets a result by waiting for it and in no other way, so starts, waits and bytes are seen outside of the learner's
code. Calls of a group are matched by their number, messages by sender, receiver and tag in the order in which they were
sent. Calls that do not fit together are refused in words that name both sides. A `send` is complete when a matching
receive has started, as with gloo: a ring in which every rank sends first deadlocks, and is told so (`transport_waits`).

No number that a rank sends is believed: a rank can wait only for what it has started itself, its
tensors must be those that its header names, and it holds a limited number of bytes here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from labkit.broker import Letter, serve
from labkit.plain import DTYPES
from labkit.transport_log import Log
from labkit.transport_math import Part, results, shown, whole
from labkit.transport_store import Keys
from labkit.transport_waits import Thing, Waits
from minimegatron.errors import DataError, MinimegatronError

MAX_HELD = 1 << 30  # bytes of a rank that wait here: given and not yet used, or not yet collected
_MAX_GROUPS = 64  # of a rank: in which order they are complete tells something
_LEAST = 8  # bytes that a message counts for where it says something beside its numbers: by a tag, or by being there


@dataclasses.dataclass
class _Call:
    """The k-th collective of a group."""

    parts: dict[int, Part] = dataclasses.field(default_factory=dict)  # by rank within the group
    things: dict[int, Thing] = dataclasses.field(default_factory=dict)
    error: str = ""


@dataclasses.dataclass
class _Message:
    """A send or a receive that has not been matched yet; ranks within the group, -1 for any source."""

    source: int
    target: int
    tag: int
    thing: Thing
    nbytes: int
    shown: str
    tensor: torch.Tensor | None = None  # of a send


@dataclasses.dataclass
class _Group:
    name: str
    ranks: tuple[int, ...]
    joined: dict[int, Thing] = dataclasses.field(default_factory=dict)
    error: str = ""
    count: dict[int, int] = dataclasses.field(default_factory=dict)  # calls of each global rank
    calls: dict[int, _Call] = dataclasses.field(default_factory=dict)
    sends: list[_Message] = dataclasses.field(default_factory=list)
    receives: list[_Message] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"group {list(self.ranks)}"

    def absent(self) -> set[int]:
        return set(self.ranks) - self.joined.keys()


class Transport:
    """A service of the broker.

    Args:
        ranks: number of ranks of the check.
        late: for each rank and trial the numbers that it gets one by one.
    """

    def __init__(self, ranks: int, late: Mapping[int, Sequence[Sequence[float]]] | None = None) -> None:
        self.ranks, self._late_numbers = ranks, late or {}
        self._log, self._waits, self._keys = Log(ranks), Waits(ranks, self._collected), Keys(ranks)
        self._forming: dict[str, _Group] = {}
        self._groups: dict[tuple[int, str], _Group] = {}
        self._things: dict[tuple[int, int], Thing] = {}
        self._held = dict.fromkeys(range(ranks), 0)
        self._all: list[_Group] = []
        self._made: dict[int, int] = {}  # groups, by rank, where it has returned
        self._refused = ""  # the first error that told a rank what another had asked for
        self._do = {
            "group": self._join, "start": self._start, "wait": self._wait, "test": self._test, "mark": self._mark,
            "late": self._late, "keys": self._ask_keys, "done": self._finish,
        }  # fmt: skip

    def handle(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        self._waits.heard()
        return self._do[str(header["do"])](rank, header, tensors)

    def gone(self, rank: int) -> Iterable[Letter]:
        return self._waits.gone(rank, "ended")

    def idle(self) -> Iterable[Letter]:
        return self._waits.idle()

    def evidence(self) -> dict[str, Any]:
        """Entries of each rank, what was sent and never received, and why the ranks are out of step, or None."""
        unclaimed = [
            [message.thing.rank, group.ranks[message.target], message.tag, message.nbytes]
            for group in self._all for message in group.sends
        ]  # fmt: skip
        return {"entries": self._log.to_plain(), "unclaimed": unclaimed, "out_of_step": self._out_of_step()}

    def _out_of_step(self) -> str | None:
        """What would hang the next program, or carried data past all counts: a group that only some ranks have made, a
        call that only some have started, an error whose text names what the other side asked for."""
        if refused := self._refused or self._waits.deadlock:
            return f"a communication fails: {refused}"
        if self._forming:
            return "some ranks make a group that others do not make"
        made = [self._made[rank] for rank in sorted(self._made)]
        if made and len(set(made)) > 1:
            more = max(made) - min(made)
            return (
                f"some ranks have made {more} group{'s' * (more > 1)} more than others; the next group would hang: "
                "every rank calls dist.new_group for each group, its members or not"
            )
        for group in self._all:
            if len({group.count.get(rank, 0) for rank in group.ranks}) > 1:
                where = "the world" if len(group.ranks) == self.ranks else str(group)
                return (
                    f"after the call the ranks no longer meet in {where}: some have started a communication that "
                    "others have not"
                )
        return None

    # -------------------------------------------------------------------------------------------------- groups

    def _join(self, rank: int, header: dict[str, Any], _: Any) -> list[Letter]:
        name, ranks = str(header["name"])[:200], tuple(whole(r) for r in header["ranks"])
        if rank not in ranks or len(set(ranks)) != len(ranks) or max(ranks) >= self.ranks:
            raise DataError(f"rank {rank} creates a group of the ranks {list(ranks)}"[:200])
        if sum(one == rank for one, _ in self._groups) >= _MAX_GROUPS:
            raise DataError(f"more than {_MAX_GROUPS} groups")
        group = self._forming.setdefault(name, _Group(name, ranks))
        thing = Thing(rank, f"new_group({list(ranks)})", group.absent)
        if group.ranks != ranks:
            sides = sorted([(min(group.joined), list(group.ranks)), (rank, list(ranks))])
            group.error = "the ranks do not create the same groups in the same order: " + ", ".join(
                f"rank {one} creates one of the ranks {members}" for one, members in sides
            )
            self._refused = self._refused or group.error
        if rank in group.joined:
            raise DataError(f"rank {rank} joins {group} twice")
        group.joined[rank] = thing
        if not group.absent() or group.error:
            self._forming.pop(name, None)
            for member in group.joined.values():
                member.done, member.error = not group.error, group.error
        if not group.absent() and not group.error:
            self._all.append(group)
            self._groups.update({(r, name): group for r in ranks})
        return self._waits.add(thing, header["id"], _threads(header), None)

    def _group(self, rank: int, header: dict[str, Any]) -> _Group:
        group = self._groups.get((rank, str(header["group"])))
        if group is None:
            raise DataError(f"rank {rank} is in no group {header['group']!r:.40}")
        return group

    # -------------------------------------------------------------------------------------------------- starts

    def _start(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> list[Letter]:
        """Start a call. There is no answer: errors are reported to the wait."""
        number = header["id"]
        if type(number) is not int or (rank, number) in self._things:
            raise DataError("a start needs a number of its own")
        thing = Thing(rank, "", tuple)
        self._things[rank, number] = thing
        self._held[rank] += sum(tensor.nbytes for tensor in tensors)
        try:
            if self._held[rank] > MAX_HELD:
                raise DataError(f"rank {rank} has started communications of more than {MAX_HELD >> 20} MiB and waited "
                                "for none")  # fmt: skip
            group = self._group(rank, header)
            begin = self._message if header["op"] in ("send", "recv") else self._collective
            begin(rank, group, header, tensors, thing)
        except MinimegatronError as error:
            self._held[rank] -= sum(tensor.nbytes for tensor in tensors)
            thing.error = error.what
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError) as error:
            self._held[rank] -= sum(tensor.nbytes for tensor in tensors)
            thing.error = f"a start that cannot be read: {type(error).__name__}: {error}"[:200]
        return self._waits.settle()

    def _collective(
        self, rank: int, group: _Group, header: dict[str, Any], tensors: list[torch.Tensor], thing: Thing
    ) -> None:
        me = group.ranks.index(rank)
        part = Part.read(header, tensors, me, len(group.ranks))
        number = group.count.get(rank, 0)
        group.count[rank] = number + 1
        call = group.calls.setdefault(number, _Call())
        thing.what = f"{part.op} of {group}"
        thing.lacks = functools.partial(_lacking, group, call)
        thing.entry = self._log.start(rank, part.op, group.ranks, header.get("at"), op=part.reduce)
        thing.entry.sent = part.nbytes
        other = next(iter(call.parts), None)
        if other is not None and not part.fits(call.parts[other]):
            sides = sorted([(group.ranks[other], str(call.parts[other])), (rank, str(part))])
            call.error = call.error or f"call {number + 1} of {group} is not the same on its ranks: " + ", ".join(
                f"rank {one} calls {what}" for one, what in sides
            )
        call.parts[me], call.things[me] = part, thing
        if call.error:
            self._refused = self._refused or call.error
            for one in call.things.values():
                one.error = call.error
        if len(call.parts) == len(group.ranks):
            self._complete(group, call)
            del group.calls[number]

    def _complete(self, group: _Group, call: _Call) -> None:
        for me, part in call.parts.items():
            self._held[group.ranks[me]] -= part.nbytes
            call.things[me].lacks = tuple  # holds the parts no longer
        if call.error:
            return
        try:
            given = results([call.parts[me] for me in range(len(group.ranks))], group.ranks)
        except DataError as error:
            self._refused = self._refused or error.what
            for thing in call.things.values():
                thing.error = error.what
            return
        for me, tensors in enumerate(given):
            self._deliver(call.things[me], tensors)

    def _deliver(self, thing: Thing, tensors: list[torch.Tensor], **facts: Any) -> None:
        thing.done, thing.tensors, thing.facts = True, tensors, facts
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._held[thing.rank] += nbytes
        if thing.entry is not None:
            thing.entry.received = nbytes

    def _message(
        self, rank: int, group: _Group, header: dict[str, Any], tensors: list[torch.Tensor], thing: Thing
    ) -> None:
        me, size, sends = group.ranks.index(rank), len(group.ranks), header["op"] == "send"
        peer, tag = whole(header["peer"], 0 if sends else -1), whole(header.get("tag", 0), -(1 << 31))
        if peer >= size or len(tensors) != sends:
            raise DataError(f"a {header['op']} of {len(tensors)} tensors with rank {peer} of a group of {size}")
        nbytes = tensors[0].nbytes if sends else whole(header["nbytes"])
        source, target = (me, peer) if sends else (peer, me)
        others = [group.ranks[peer]] if peer >= 0 else [r for r in group.ranks if r != rank]
        whom = f"{'to' if sends else 'from'} rank {others[0]}" if peer >= 0 else "from any rank"
        thing.what = f"{header['op']} {whom}" + (f" with tag {tag}" if tag else "")
        thing.lacks, thing.any_of = others.copy, peer < 0
        thing.entry = self._log.start(rank, str(header["op"]), group.ranks, header.get("at"), peer)
        thing.entry.sent = max(nbytes, 0 if nbytes and not tag else _LEAST) if sends else 0
        dtype, shape = (tensors[0].dtype, list(tensors[0].shape)) if sends else _told(header, nbytes)
        mine = _Message(source, target, tag, thing, nbytes, shown(dtype, shape), tensors[0] if sends else None)
        queue, waiting = (group.sends, group.receives) if sends else (group.receives, group.sends)
        for other in waiting:
            if _meet(mine, other):
                waiting.remove(other)
                return self._hand_over(group, *((mine, other) if sends else (other, mine)))
        queue.append(mine)

    def _hand_over(self, group: _Group, send: _Message, receive: _Message) -> None:
        assert send.tensor is not None
        self._held[send.thing.rank] -= send.nbytes
        if send.nbytes != receive.nbytes:
            said = (
                f"rank {send.thing.rank} sends {send.nbytes} bytes ({send.shown}) to rank {receive.thing.rank}, whose "
                f"buffer has {receive.nbytes} ({receive.shown})"
            )
            self._refused = self._refused or said
            send.thing.error = receive.thing.error = said
            return
        self._deliver(send.thing, [])
        if receive.thing.entry is not None:
            receive.thing.entry.peer = send.source
        self._deliver(receive.thing, [send.tensor.reshape(-1).view(torch.uint8)], source=send.source)

    # --------------------------------------------------------------------------------------------------- waits

    def _thing(self, rank: int, header: dict[str, Any]) -> Thing:
        thing = self._things.get((rank, header["work"])) if type(header["work"]) is int else None
        if thing is None:
            raise DataError("this is nothing that the rank has started")
        return thing

    def _wait(self, rank: int, header: dict[str, Any], _: Any) -> list[Letter]:
        """Wait for a call. `quiet`: a future's thread asks, the program does not wait; `note`: it waits for what was
        collected so."""
        thing = self._thing(rank, header)
        if thing.entry is not None and not header.get("quiet"):
            self._log.wait(thing.entry, header.get("at"))
        if header.get("note"):
            return []
        seconds = header.get("seconds")
        return self._waits.add(thing, header["id"], _threads(header),
                               float(seconds) if isinstance(seconds, int | float) else None)  # fmt: skip

    def _test(self, rank: int, header: dict[str, Any], tensors: Any) -> list[Letter]:
        thing = self._thing(rank, header)
        if not thing.done and not thing.error:
            return [(rank, {"id": header["id"], "ready": False}, ()), *self._waits.settle()]
        thing.facts["ready"] = True
        return self._wait(rank, header, tensors)

    def _collected(self, thing: Thing) -> None:
        nbytes = sum(tensor.nbytes for tensor in thing.tensors)
        if thing.entry is not None and thing.entry.name == "store":  # never held for this rank
            thing.entry.received = nbytes
        else:
            self._held[thing.rank] -= nbytes
        thing.tensors = []

    # -------------------------------------------------------------------------------------------------- others

    def _mark(self, rank: int, header: dict[str, Any], _: Any) -> list[Letter]:
        self._log.start(rank, "mark", (), header.get("at"), op=str(header["name"])[:200])
        return []

    def _late(self, rank: int, header: dict[str, Any], _: Any) -> list[Letter]:
        """A number that the rank could not have before; computation with it comes after this moment."""
        index = whole(header["index"])
        number = self._late_numbers[rank][whole(header["trial"])][index]
        self._log.start(rank, "mark", (), header.get("at"), op=f"late {index}")
        return [(rank, {"id": header["id"], "number": number}, ())]

    def _ask_keys(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> list[Letter]:
        thing = self._keys.asked(rank, header, tensors)
        thing.entry = self._log.start(rank, "store", tuple(range(self.ranks)), header.get("at"))
        told = sum(len(str(name).encode()) for name in header["names"]) + sum(tensor.nbytes for tensor in tensors)
        thing.entry.sent = _LEAST + told  # a key and a number tell something, too
        seconds = header.get("seconds")
        return self._waits.add(thing, header["id"], _threads(header),
                               float(seconds) if isinstance(seconds, int | float) else None)  # fmt: skip

    def _finish(self, rank: int, header: dict[str, Any], _: Any) -> list[Letter]:
        self._made[rank] = whole(header["groups"])
        return self._waits.gone(rank, "returned" if header.get("took_part", True) else "no part in this call")


def listen(lines: list[socket.socket], control: socket.socket, job: Any) -> dict[str, Any]:
    """The broker's process of a check on ranks: `Nursery.call(..., beside=(listen, {rank: late numbers}))`."""
    return serve(lines, control, {"transport": Transport(len(lines), job)})["transport"]


def _lacking(group: _Group, call: _Call) -> list[int]:
    return [rank for me, rank in enumerate(group.ranks) if me not in call.parts]


def _meet(one: _Message, other: _Message) -> bool:
    same = one.source == other.source or -1 in (one.source, other.source)
    return same and one.target == other.target and one.tag == other.tag


def _told(header: dict[str, Any], nbytes: int) -> tuple[torch.dtype, list[int]]:
    """The dtype and shape of a receiver's buffer, if they match its bytes; then another rank may be told them."""
    dtype, shape = DTYPES[str(header["dtype"])], [whole(n) for n in list(header["shape"])[:16]]
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise DataError(f"a buffer of {nbytes} bytes that is not of its dtype and shape")
    return dtype, shape


def _threads(header: dict[str, Any]) -> int:
    return whole(header.get("threads", 1))
