"""Lab 03, `warm_up`: how many forwards 1F1B begins with where messages take time, another one at each border.

Rank r starts with w[r] forwards, goes on with F and B in turn, and ends with the backwards that are left. In the steady
state every rank works without a pause, a period of F + B for each microbatch. Two neighbours then allow it only if a
microbatch can go from r to r+1 and its gradient come back in a whole number of periods::

    (w[r] - w[r+1]) (F + B) >= F + B + 2 latency[r]

These are the only conditions, so there is one least answer: w[r] is a sum over the borders behind r, each rounded up.
The round trip from r to the end and back, rounded up once, is less, and too little.

An answer is judged by what it does: its lists are played, with a latency for each border.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

from labkit.exercises import Accept, Answer, Case, Draw, Exercise

Inputs = dict[str, Any]

_LONG = 240  # microbatches: what a pause in each of them costs cannot be lost in the time to fill and drain


def _drive(exercise: Any, forward: int, backward: int, latency: Any) -> list[Any]:
    """The answer of each rank."""
    return [exercise.warm_up(rank, forward, backward, list(latency)) for rank in range(len(latency) + 1)]


def enough(forward: int, backward: int, latency: Sequence[int]) -> list[int]:
    """The least warm-up of each rank, least on all ranks at once."""
    waits = [1 - (-2 * one // (forward + backward)) for one in latency]
    return [sum(waits[rank:]) for rank in range(len(latency) + 1)]


def makespan(warmups: Sequence[int], m: int, forward: int, backward: int, latency: Sequence[int]) -> int | None:
    """The time of m microbatches, by the rules of `schedule_sim.simulate`; None if the ranks wait for each other.

    Args:
        warmups: of each rank; none is longer than m.
        m: microbatches.
        forward: the time of an F.
        backward: of a whole B.
        latency: of a message over border r, between ranks r and r+1.
    """
    p, rows = len(warmups), list[list[tuple[str, int]]]()
    for warmup in warmups:
        ahead = min(m, warmup)
        steps = [[("F", i), ("B", i - ahead)] for i in range(m + ahead)]
        rows.append([one for step in steps for one in step if 0 <= one[1] < m])
    ends, at, free = dict[tuple[int, str, int], int](), [0] * p, [0] * p
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, i = row[at[rank]]
                sender = rank - 1 if kind == "F" else rank + 1
                arrival = 0
                if 0 <= sender < p:
                    if (sender, kind, i) not in ends:
                        break
                    arrival = ends[sender, kind, i] + latency[min(rank, sender)]
                took = forward if kind == "F" else backward
                free[rank] = ends[rank, kind, i] = max(free[rank], arrival) + took
                at[rank] += 1
                moved = True
    return max(free) if all(len(row) == done for row, done in zip(rows, at, strict=True)) else None


def _read(value: Any, p: int) -> list[int] | str:
    """The answers of all ranks as integers, or what is wrong with one."""
    for rank, one in enumerate(value):
        if isinstance(one, bool) or not isinstance(one, Real) or one != int(float(one)) or one < 0:
            return f"rank {rank}: {one!r} is no number of forwards"
    return [int(one) for one in value]


def _named(forward: int, backward: int, latency: Sequence[int]) -> str:
    messages = ", ".join(map(str, latency))
    return f"F takes {forward}, B {backward}, messages over the borders {messages}"


def _time(warmups: Sequence[int], forward: int, backward: int, latency: Sequence[int]) -> str | None:
    """What makes lists with these warm-ups slower than GPipe's, or nothing."""
    work = forward + backward
    fill = (len(warmups) - 1) * work + 2 * sum(latency)
    for m in (1, 2, len(warmups), 4 * len(warmups), _LONG):
        took, within = makespan(warmups, m, forward, backward, latency), fill + m * work
        begins = f"the warm-ups are {', '.join(map(str, warmups))}"
        if took is None:
            r = next(r for r, (a, b) in enumerate(zip(warmups, warmups[1:], strict=False)) if a < b)
            return (
                f"{begins}: deadlock. Rank {r + 1} does {min(m, warmups[r + 1] + 1)} forwards before its first "
                f"backward, rank {r} only {warmups[r] + 1}; then each waits for the other"
            )
        if took > within:
            short = next(r for r in reversed(range(len(latency))) if _paused(r, warmups, forward, backward, latency))
            alone = _period(warmups[short : short + 2], forward, backward, latency[short : short + 1])
            return (
                f"{begins}; {m} microbatches take {took} ms, GPipe {within}. Ranks {short} and {short + 1} keep each "
                f"other waiting: these two alone need {float(alone):.4g} ms for each further microbatch, in which a "
                f"rank works {work}"
            )
    return None


def _period(warmups: Sequence[int], forward: int, backward: int, latency: Sequence[int]) -> Fraction:
    """The time that each further microbatch takes in the steady state."""
    few, many = _LONG, 2 * _LONG
    times = [makespan(warmups, m, forward, backward, latency) for m in (few, many)]
    return Fraction((times[1] or 0) - (times[0] or 0), many - few)


def _paused(rank: int, warmups: Sequence[int], forward: int, backward: int, latency: Sequence[int]) -> bool:
    """Whether this rank and the next one cannot both work without a pause."""
    two = _period(warmups[rank : rank + 2], forward, backward, latency[rank : rank + 1])
    return two > forward + backward


def _accept(memory: bool) -> Accept:
    def accept(answer: Answer) -> str | None:
        sizes = answer.inputs
        warmups = _read(answer.value, len(sizes["latency"]) + 1)
        if isinstance(warmups, str):
            return warmups if not memory else "not judged yet: see above"
        slow = _time(warmups, **sizes)
        if not memory:
            return slow and f"{_named(**sizes)}: {slow}"
        least = enough(**sizes)
        over = [rank for rank, (w, few) in enumerate(zip(warmups, least, strict=True)) if w > few]
        if over and not slow:  # behind the last of them all is as short as can be, so this one may be shorter
            return (
                f"{_named(**sizes)}: rank {over[-1]} begins with {warmups[over[-1]]} forwards; with fewer it "
                "would take no longer, and keep fewer activations"
            )
        return "no points yet: it counts only for lists as fast as the row above asks" if slow else None

    return accept


def _borders(draw: Draw) -> Inputs:
    """Borders of which some are fast, some slow, with a whole number of periods among them now and then."""
    forward = draw.integer(4, 9)
    backward = forward * draw.choice([2, 3])
    some = [0, 1, forward, (forward + backward) // 2, forward + backward, 2 * (forward + backward) + 1]
    return {
        "forward": forward, "backward": backward, "latency": [draw.choice(some) for _ in range(draw.integer(3, 6))],
    }  # fmt: skip


def _sizes(forward: int, backward: int, *latency: int) -> Inputs:
    return {"forward": forward, "backward": backward, "latency": list(latency)}


_RUNS = [
    _sizes(10, 20, 50),  # one border; most of the known mistakes differ here
    _sizes(10, 20, 1, 1, 1),  # a message there and back costs a whole further period at each border
    _sizes(10, 20, 15, 15, 15), _sizes(10, 20, 16, 16), _sizes(10, 20, 45),
    _sizes(10, 20, 0, 40, 0), _sizes(10, 20, 40, 0, 0), _sizes(10, 20, 0, 0, 40), _sizes(10, 30, 5, 20, 25, 3),
    _sizes(10, 30, 20, 20), _sizes(5, 10, 50, 1, 1, 1, 0),
]  # fmt: skip

WARM_UP = Exercise(
    "warm_up",
    drive=_drive,
    cases=[
        Case("4 ranks, messages take no time", _sizes(10, 20, 0, 0, 0), accept=[_accept(False), _accept(True)]),
        Case("no longer than GPipe's lists, where messages take time", _borders, points=2, hidden=True, fixed=_RUNS,
             accept=[_accept(False)]),
        Case("and not one forward more than that needs", _borders, points=2, hidden=True, fixed=_RUNS,
             accept=[_accept(True)]),
    ],
    idea="In the steady state every rank starts one F and one B in each F + B of time. Follow one microbatch from its "
    "F on rank r to its B there. What has to fit in between, and when can rank r start a B?",
    hint="Rank r starts the B of a microbatch w[r] periods and one F after it started its F, where a period is F + B. "
    "The same holds on rank r+1 with its own w. Between the two lie F and a message on the way there, B and a message "
    "on the way back: (w[r] - w[r+1]) periods must be at least a period and 2 latency[r]. So each border adds "
    "1 + 2 latency[r] / period, rounded up, to the warm-up of all ranks before it; the last rank needs none.",
)  # fmt: skip
