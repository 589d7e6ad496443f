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

What is compared are calls, read from the records of the ranks (`launch/flight_calls`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minimegatron.errors import named, ranges
from minimegatron.launch.flight_calls import Call, Records


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
            if len(most) == len(others[-1]) and _support(records, odd) > _support(records, usual):
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


def _created(call: Call) -> int:
    return call.created


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
    departs = _departs(records)
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


# -------------------------------------------------------------------------------------- ranks beside other ranks


def _departs(records: Records) -> dict[int, tuple[Call, Call]]:
    """Ranks whose calls followed those of others and then no longer do: (own call, the others' call).

    Ranks of one program make the same calls in one order, each over its own group of an axis. Two ranks are
    compared if at least half of their calls agree, so stages of a pipeline are not. A rank that agrees with some
    other one to the end of the shorter record does not depart.
    """
    first = max((calls[0].record for calls in records.calls.values() if calls), default=0)
    order = {r: [c for c in calls if c.record >= first and not c.beside] for r, calls in records.calls.items()}
    found = {}
    for rank, calls in order.items():
        last = list[tuple[int, Call, Call]]()
        for other, theirs in order.items():
            common = next((i for i, (a, b) in enumerate(zip(calls, theirs, strict=False)) if a.step != b.step), None)
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


def _support(records: Records, call: Call) -> tuple[int, bool]:
    """How many ranks outside of its group make this call with the same number, from the same line over another
    group of its axis; and whether its rank still follows others."""
    outside = [c for rank, calls in records.calls.items() if rank not in call.group[1] for c in calls]
    alike = [c for c in outside if (c.step, c.number, c.what) == (call.step, call.number, call.what)]
    return len({c.rank for c in alike}), call.rank not in _departs(records)


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
