"""The first mismatch in the records of all ranks: who did which call at which line while the others waited in which.

    all_reduce #17 over tp (ranks 0-1): rank 1 calls it with [4, 9] float32 at model.py:12, rank 0 with [4, 8]

The problem in a sentence: after a hang a hundred ranks wait, all but one of them because of another rank.

Three things are looked for, in this order, and the first that is found is told:

1. **Two ranks disagree about a call**: the n-th collective of a group is another operation, or has another shape, dtype
   or reduction; a message is received in another shape than it was sent. Of several groups the call that was issued
   first counts. Where the calls after it agree again in another order, or shifted by one, that is said: the order, or a
   call that a rank left out; and where a rank made the call of this line over another axis, that.
2. **A rank did not come.** Each waiting rank points to those that its call lacks. Ranks that do not wait themselves
   are the cause: they are in user code, or have left no record (killed, stopped). If there are none, ranks wait in a
   circle, and the rank whose calls no longer follow those of any other is named.
3. **The same calls from other lines**: the calls agree in everything, and lines of code are in another order. gloo then
   adds up wrong numbers and nothing hangs.

A record is that of `launch/flight_dump`, or torch's own of NCCL, which has no lines of user code and no waits: there
the first call that is not complete counts as one. Clocks of machines are corrected by their offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from minimegatron.errors import named, ranges

Dump = Mapping[str, Any]
_SHAPES_MAY_DIFFER = ("all_to_all", "all_gather_v", "gather", "scatter", "barrier")  # by design, or there are none
_SHORT = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8",
}  # fmt: skip


class Call(NamedTuple):
    """An entry of a rank, as far as it is compared.

    Attributes:
        rank: whose.
        record: its place among all calls of the rank.
        group: name of the process group and its ranks.
        number: its place among the collectives of the group, or the messages of the edge.
        op: name of the operation.
        axis: what the group is for.
        shape, dtype, extra: of its input; of a message, of the tensor.
        sends: for a message whether it is sent; None for a collective.
        place: the line of user code.
        site: the innermost lines of the stack outside of `comm`, by which two calls are told apart.
        created: nanoseconds, on the clock of the first rank.
        waits: the rank waits for it.
        comparable: whether shapes must agree.
    """

    rank: int
    record: int
    group: tuple[str, tuple[int, ...]]
    number: int
    op: str
    axis: str
    shape: str
    dtype: str
    extra: str
    sends: bool | None
    place: str
    site: str
    created: int
    waits: bool
    comparable: bool

    @property
    def what(self) -> tuple[str, str, str, str]:
        """What must agree between ranks."""
        return (
            "" if self.sends is not None else self.op,
            self.shape if self.comparable else "",
            self.dtype,
            self.extra,
        )

    @property
    def step(self) -> tuple[str, str, str]:
        """What it is in the program: the operation, the axis, the line."""
        return (self.op, self.axis, self.site)

    @property
    def beside(self) -> bool:
        """Whether a thread beside the training makes it, so that its place among the other calls means nothing."""
        return self.axis == "checkpoint"

    @property
    def named(self) -> str:
        """`all_reduce #17 over tp (ranks 0-1)`, `message #3 from rank 0 to rank 1 over pp`."""
        ranks = self.group[1]
        if self.sends is None:
            return f"{self.op} #{self.number} over {self.axis} (ranks {ranges(ranks)})"
        other = next(rank for rank in ranks if rank != self.rank)
        ends = (self.rank, other) if self.sends else (other, self.rank)
        return f"message #{self.number} from rank {ends[0]} to rank {ends[1]} over {self.axis}"

    @property
    def tensor(self) -> str:
        return " ".join(filter(None, (self.shape, self.dtype, self.extra)))

    @property
    def at(self) -> str:
        return f" at {self.place}" if self.place else ""


class Finding(NamedTuple):
    """What was found.

    Attributes:
        kind: `operation`, `shape`, `dtype`, `order`, `left out`, `group`, `missing`, `circle`, `not ended` or `lines`;
            "" for nothing.
        text: one line.
        ranks: the ranks it names as the cause.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.kind)

    @property
    def certain(self) -> bool:
        """Whether calls contradict each other, as opposed to ranks that wait for another."""
        return self.kind not in ("", "missing", "circle", "not ended")


NOTHING = Finding("", "the records of all ranks agree, and no rank waits")


class Records:
    """The records of all ranks that have left one.

    Args:
        dumps: those of `launch/flight_dump`, by rank.
        world: how many ranks there are; default those of the dumps say.

    Attributes:
        calls: the calls of each rank, oldest first.
        world: number of ranks.
    """

    def __init__(self, dumps: Mapping[int, Dump], world: int | None = None) -> None:
        self.dumps = dict(sorted(dumps.items()))
        ranks = [r for dump in dumps.values() for pg in dump["pg_config"].values() for r in _ranks(pg["ranks"])]
        self.world = world or max([*dumps, *ranks], default=-1) + 1
        # Of a rank that was killed only the innermost line of a call is known.
        lines = 1 if any("partial" in dump for dump in dumps.values()) else None
        self.calls = {rank: list(_calls(rank, dump, lines)) for rank, dump in self.dumps.items()}
        self._by_number = {
            rank: {(call.group, call.sends, call.number): call for call in calls} for rank, calls in self.calls.items()
        }
        self.groups = {call.group for calls in self.calls.values() for call in calls}

    def call(self, rank: int, like: Call, number: int | None = None) -> Call | None:
        """The call of a rank in the same group, with the same number or another."""
        number = like.number if number is None else number
        sends = like.sends if like.sends is None or rank == like.rank else not like.sends
        return self._by_number.get(rank, {}).get((like.group, sends, number))

    def waiting(self, rank: int) -> Call | None:
        """The call in which a rank waits; if several, the first that it waits for."""
        return next((call for call in self.calls.get(rank, ()) if call.waits), None)

    def absent(self, call: Call) -> list[int]:
        """Ranks of its group that have not made this call; those whose record begins later have."""
        return [r for r in call.group[1] if r != call.rank and not self._came(r, call)]

    def _came(self, rank: int, call: Call) -> bool:
        sends = call.sends if call.sends is None else not call.sends
        numbers = [n for group, s, n in self._by_number.get(rank, {}) if group == call.group and s == sends]
        counted = self.dumps.get(rank, {}).get("counts", {}).get(call.group[0], (0, 0))[call.sends is not None]
        return max([counted, *numbers]) >= call.number

    def departs(self) -> dict[int, tuple[Call, Call]]:
        """Ranks whose calls followed those of others and then no longer do: (own call, the others' call).

        Ranks of one program make the same calls in one order, each over its own group of an axis. Two ranks are
        compared if at least half of their calls agree, so stages of a pipeline are not. A rank that agrees with some
        other one to the end of the shorter record does not depart.
        """
        first = max((calls[0].record for calls in self.calls.values() if calls), default=0)
        order = {r: [c for c in calls if c.record >= first and not c.beside] for r, calls in self.calls.items()}
        found = {}
        for rank, calls in order.items():
            last = list[tuple[int, Call, Call]]()
            for other, theirs in order.items():
                common = next(
                    (i for i, (a, b) in enumerate(zip(calls, theirs, strict=False)) if a.step != b.step), None
                )
                shorter = min(len(calls), len(theirs))
                if other == rank or shorter == 0 or (common is not None and 2 * common < shorter):
                    continue
                if common is None:
                    break
                last.append((common, calls[common], theirs[common]))
            else:
                if last:
                    _, own, usual = max(last, key=lambda one: one[0])
                    found[rank] = (own, usual)
        return found

    def support(self, call: Call) -> tuple[int, bool]:
        """How many ranks outside of its group make this call with the same number, from the same line over another
        group of its axis; and whether its rank still follows others."""
        outside = [c for rank, calls in self.calls.items() if rank not in call.group[1] for c in calls]
        alike = [c for c in outside if (c.step, c.number, c.what) == (call.step, call.number, call.what)]
        return len({c.rank for c in alike}), call.rank not in self.departs()

    def after(self, call: Call) -> Call | None:
        """The next call of the same rank, in whatever group."""
        return next((c for c in self.calls[call.rank] if c.record > call.record and not c.beside), None)


def first_mismatch(records: Records) -> Finding:
    """What is wrong, in one line; `NOTHING` if nothing is."""
    return _disagreement(records) or _missing(records) or _lines(records) or NOTHING


# ------------------------------------------------------------------------------------------- calls that disagree


def _disagreement(records: Records) -> Finding | None:
    found = list[tuple[int, Call, Call]]()
    for group in records.groups:
        pair = _first_difference(records, group)
        if pair is not None:
            found.append((min(call.created for call in pair), *pair))
    if not found:
        return None
    _, usual, odd = min(found, key=lambda one: one[0])
    return _told(records, usual, odd)


def _first_difference(records: Records, group: tuple[str, tuple[int, ...]]) -> tuple[Call, Call] | None:
    """The first call of a group about which ranks disagree: that of most ranks, and another one."""
    numbers: dict[int, dict[int, Call]] = {}
    for rank in group[1]:
        for call in records.calls.get(rank, ()):
            if call.group == group:
                numbers.setdefault(call.number, {})[rank] = call
    for number in sorted(numbers):
        by_what: dict[Any, list[Call]] = {}
        for call in numbers[number].values():
            by_what.setdefault(call.what, []).append(call)
        if len(by_what) > 1:
            most, *others = sorted(by_what.values(), key=len, reverse=True)
            usual, odd = most[0], others[-1][0]
            if len(most) == len(others[-1]) and records.support(odd) > records.support(usual):
                usual, odd = odd, usual
            return usual, odd
    return None


def _told(records: Records, usual: Call, odd: Call) -> Finding:
    """The sentence about two calls that disagree."""
    after_usual, after_odd = (records.call(call.rank, call, call.number + 1) for call in (usual, odd))
    both = (
        f"rank {odd.rank} is in {odd.op} {odd.tensor}{odd.at}, rank {usual.rank} in {usual.op} {usual.tensor}{usual.at}"
    )
    where = f"call #{usual.number} of {usual.axis} (ranks {ranges(usual.group[1])})"
    if _same(after_usual, odd) and _same(after_odd, usual):
        return Finding("order", f"{where} and the next are in another order on rank {odd.rank}: {both}", (odd.rank,))
    if _skips(records, usual, odd):
        text = f"rank {odd.rank} left out {usual.named} of {usual.tensor}{usual.at}: it is in {odd.op} {odd.tensor}"
        return Finding("left out", text + odd.at, (odd.rank,))
    if elsewhere := _over_another_axis(records, odd):
        text = f"rank {odd.rank} calls {_call(odd)}, where rank {elsewhere.rank} calls it over {elsewhere.axis}; "
        return Finding("group", text + f"rank {usual.rank} is in {_call(usual)}", (odd.rank,))
    if usual.sends is not None:
        sent, received = (usual, odd) if usual.sends else (odd, usual)
        text = f"{sent.named}: rank {sent.rank} sends {sent.tensor}{sent.at}, rank {received.rank} expects "
        return Finding("shape", text + received.tensor + received.at, (odd.rank, usual.rank))
    if _left_out(records, odd, usual):
        text = f"{where}: rank {odd.rank} makes {_call(odd)} where rank {usual.rank} makes {_call(usual)}, which came "
        return Finding("order", text + "first in earlier steps: another order, or left out", (odd.rank,))
    if usual.op != odd.op:
        return Finding("operation", f"{where}: {both}", (odd.rank,))
    differs = "shape" if usual.shape != odd.shape else "dtype" if usual.dtype != odd.dtype else "operation"
    text = f"{usual.named}: rank {odd.rank} calls it with {odd.tensor}{odd.at}, rank {usual.rank} with "
    return Finding(differs, text + usual.tensor + usual.at, (odd.rank,))


def _skips(records: Records, usual: Call, odd: Call) -> bool:
    """Whether the odd rank went on to the call that the usual one makes next, from the same line."""
    return _same(records.call(usual.rank, usual, usual.number + 1), odd)


def _same(one: Call | None, other: Call | None) -> bool:
    return one is not None and other is not None and (one.what, one.site) == (other.what, other.site)


def _over_another_axis(records: Records, call: Call) -> Call | None:
    """A call of another rank from the same line, whose axis is always another one."""
    others = [c for rank, calls in records.calls.items() if rank != call.rank for c in calls if _same(c, call)]
    return others[-1] if call.site and others and all(c.axis != call.axis for c in others) else None


# ----------------------------------------------------------------------------------------------- who did not come


def _missing(records: Records) -> Finding | None:
    waiting = {rank: call for rank in records.calls if (call := records.waiting(rank)) is not None}
    if not waiting:
        return None
    lacks = {rank: records.absent(call) for rank, call in waiting.items()}
    causes = sorted({r for absent in lacks.values() for r in absent if r not in waiting})
    if causes:
        first = min((call for rank, call in waiting.items() if set(lacks[rank]) & set(causes)), key=_created)
        late = [r for r in lacks[first.rank] if r in causes]
        waits = f"rank {first.rank} waits in {first.named} of {first.tensor}{first.at}"
        return Finding("missing", f"{waits}: {named(late)} did not come; {_whereabouts(records, late)}", tuple(late))
    blocked = {rank: call for rank, call in waiting.items() if lacks[rank]}
    if not blocked:
        first = min(waiting.values(), key=_created)
        return Finding(
            "not ended", f"all ranks came to {first.named}, and it has not ended on rank {first.rank}{first.at}"
        )
    circle = _circle(blocked, lacks)
    departs = records.departs()
    if len(departs) == 1:
        return _departed(records, *next(iter(departs.values())))
    steps = [f"rank {call.rank} waits in {call.named}{call.at} for {named(lacks[call.rank])}" for call in circle]
    return Finding("circle", "ranks wait in a circle: " + ", ".join(steps), tuple(call.rank for call in circle))


def _departed(records: Records, own: Call, usual: Call) -> Finding:
    """The sentence about a rank whose calls no longer follow those of the others."""
    rank, others = own.rank, f"other ranks call {usual.op} {usual.tensor} over {usual.axis}{usual.at}"
    after_own, after_usual = records.after(own), records.after(usual)
    if after_own and after_usual and (after_own.step, after_usual.step) == (usual.step, own.step):
        kind, text = "order", f"rank {rank} makes two calls in another order: {_call(own)} first, where {others} first"
    elif missed := _left_out(records, own, usual):
        more = f" and {missed - 1} more calls" if missed > 1 else ""
        text = f"rank {rank} left out {_call(usual)}{more}, and is in {own.named}{own.at}"
        kind = "left out"
    elif (own.op, own.site) == (usual.op, usual.site):
        kind, text = "group", f"rank {rank} calls {_call(own)}, where {others}"
    else:
        kind, text = "operation", f"rank {rank} calls {_call(own)}, where {others}"
    return Finding(kind, text, (rank,))


def _left_out(records: Records, own: Call, usual: Call, most: int = 16) -> int:
    """How many calls come between the one that the others make and the one that this rank makes instead; 0 if that is
    not known, from what the others do next or from what this rank did the last time."""
    after = records.after(usual)
    if after is not None and after.step == own.step:
        return 1
    before = [call.step for call in records.calls[own.rank] if call.record < own.record and not call.beside]
    if usual.step not in before:
        return 0
    last = len(before) - 1 - before[::-1].index(usual.step)
    then = before[last : last + most]
    return then.index(own.step) if own.step in then else 0


def _call(call: Call) -> str:
    return f"{call.op} {call.tensor} over {call.axis}{call.at}"


def _circle(blocked: Mapping[int, Call], lacks: Mapping[int, Sequence[int]]) -> list[Call]:
    """A circle of ranks that wait for each other, from the one whose call is the oldest."""
    path, rank = list[int](), min(blocked, key=lambda r: blocked[r].created)
    while rank not in path and rank in blocked:
        path.append(rank)
        rank = min((r for r in lacks[rank] if r in blocked), key=lambda r: blocked[r].created, default=-1)
    circle = path[path.index(rank) :] if rank in path else path
    first = min(range(len(circle)), key=lambda i: blocked[circle[i]].created)
    return [blocked[r] for r in circle[first:] + circle[:first]]


def _whereabouts(records: Records, ranks: Iterable[int]) -> str:
    said = []
    for rank in ranks:
        dump = records.dumps.get(rank)
        last = records.calls[rank][-1] if records.calls.get(rank) else None
        if dump is None:
            said.append(f"rank {rank} left no record (killed or stopped?)")
        else:
            position = dump.get("position") or "an unknown line"
            said.append(f"rank {rank} is at {position}" + (f", after {last.named}" if last is not None else ""))
    return "; ".join(said)


# ------------------------------------------------------------------------------------- the same calls, other lines


def _lines(records: Records) -> Finding | None:
    """Two calls that agree in everything and come from two lines in another order."""
    found = []
    for group in records.groups:
        for rank in group[1]:
            calls = {c.number: c for c in records.calls.get(rank, ()) if c.group == group and c.sends is None}
            for number, call in calls.items():
                if (then := calls.get(number + 1)) is None or call.site == then.site:
                    continue
                for other in group[1]:
                    one, two = records.call(other, call), records.call(other, then)
                    if other > rank and one and two and (one.site, two.site) == (then.site, call.site):
                        found.append((call, then, one))
    if not found:
        return None
    call, then, one = min(found, key=lambda pair: pair[0].created)
    text = (
        f"call #{call.number} of {call.axis} (ranks {ranges(call.group[1])}) and the next come from two lines in "
        f"another order: rank {call.rank} first from {call.place}, rank {one.rank} first from {one.place}"
    )
    return Finding("lines", text, (call.rank, one.rank))


# ----------------------------------------------------------------------------------------------------------- reading


def _created(call: Call) -> int:
    return call.created


def _ranks(text: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in str(text).strip("[]()").split(",") if word.strip())


def _calls(rank: int, dump: Dump, lines: int | None = None) -> Iterable[Call]:
    members = {name: _ranks(pg["ranks"]) for name, pg in dump["pg_config"].items()}
    offset = dump.get("clock_offset_ns", 0)
    ours = "position" in dump
    for entry in dump["entries"]:
        name, desc = entry["process_group"]
        kind, _, ends = entry["profiling_name"].partition(":")[2].partition(" ")
        message = entry["is_p2p"]
        sizes, dtypes = entry["input_sizes"] or entry["output_sizes"], entry["input_dtypes"] or entry["output_dtypes"]
        pending = entry["state"] != "completed"
        yield Call(
            rank=rank,
            record=entry["record_id"],
            group=(name, members.get(name, ())),
            number=entry["p2p_seq_id"] if message else entry["collective_seq_id"],
            op=kind if message else entry.get("op", kind),
            axis=entry.get("axis") or desc,
            shape=str(list(sizes[0])) if sizes else "",
            dtype=_SHORT.get(dtypes[0], dtypes[0].lower()) if dtypes else "",
            extra=entry.get("extra", ""),
            sends=kind == "send" if message else None,
            place=entry.get("place", "") or _place(entry.get("frames", ())),
            site="<".join((entry.get("site", "") or _place(entry.get("frames", ()))).split("<")[:lines]),
            created=entry["time_created_ns"] + offset,
            waits=entry["waiting"] if ours else pending,
            comparable=entry.get("comparable", kind not in _SHAPES_MAY_DIFFER),
        )


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside of `torch.distributed`, in a dump that has no `place`."""
    for frame in frames:
        if "torch/distributed" not in str(frame["filename"]):
            return f"{PurePath(str(frame['filename'])).name}:{frame['line']} in {frame['name']}"
    return ""


# ------------------------------------------------------------------------------------------------------------ a table


def table(records: Records) -> list[tuple[str, ...]]:
    """A row for each rank, below a row of titles: what it waits in or did last, for how long, where it is."""
    rows: list[tuple[str, ...]] = [("rank", "calls", "waits in, or did last", "since", "line")]
    now = max((d["time_ns"] + d.get("clock_offset_ns", 0) for d in records.dumps.values() if "time_ns" in d), default=0)
    for rank in range(records.world):
        if rank not in records.dumps:
            rows.append((str(rank), "", "no record", "", ""))
            continue
        calls, waiting = records.calls[rank], records.waiting(rank)
        call = waiting or (calls[-1] if calls else None)
        since = f"{(now - call.created) / 1e9:.1f} s" if call is not None and now else ""
        done = "" if waiting is not None or call is None else " (done)"
        shown = f"{call.named} {call.tensor}{done}" if call is not None else "nothing"
        where = call.place if waiting is not None and call is not None else records.dumps[rank].get("position", "")
        number = records.dumps[rank]["entries"][-1]["record_id"] + 1 if calls else 0
        rows.append((str(rank), str(number), shown, since, where))
    return rows
