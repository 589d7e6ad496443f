"""Lab 04, packed documents: chunks of a sequence, dealt out so that all ranks have as many and work alike.

There is no single answer. Accepted is each deal of all chunks, as many on each rank, whose slowest rank has at most
1.03 times the mean number of pairs. Cases are such that the heaviest chunks dealt there and back stay below 1.02; each
chunk to the rank with least so far, while it has room, stays below 1.01. Sorted and dealt in one direction, zigzag over
the sequence, or chunks weighed as if all were one document, are above 1.03 in the fixed cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from labkit.exercises import Accept, Answer, Case, Draw, Exercise

SLOWEST = 1.03  # over the mean


def work_of(lengths: list[int], chunk: int) -> list[int]:
    """Visible pairs of each chunk's queries."""
    seen = [place + 1 for length in lengths for place in range(length)]
    return [sum(seen[i : i + chunk]) for i in range(0, len(seen), chunk)]


def there_and_back(work: list[int], cp: int) -> list[list[int]]:
    """The heaviest chunks first, one for each rank, and the next ones in reverse."""
    order = sorted(range(len(work)), key=lambda c: -work[c])
    held: list[list[int]] = [[] for _ in range(cp)]
    for i, c in enumerate(order):
        turn, at = divmod(i, cp)
        held[cp - 1 - at if turn % 2 else at].append(c)
    return held


def slowest(work: list[int], held: list[list[int]]) -> tuple[int, float]:
    """The rank with most pairs, and how many times the mean it has."""
    pairs = [sum(work[c] for c in chunks) for chunks in held]
    rank = max(range(len(held)), key=pairs.__getitem__)
    return rank, pairs[rank] * len(held) / sum(work)


def _whole(value: Any, chunks: int, cp: int) -> str | None:
    """What is wrong with a deal, apart from the balance."""
    try:
        held = [[int(c) for c in of] for of in value]
        named = all(int(c) == float(c) for of in value for c in of)
    except (TypeError, ValueError):
        return "it is no list with a list of numbers for each rank"
    if len(held) != cp or not named:
        return f"it has lists for {len(held)} ranks; there are {cp}" if named else "a chunk has a whole number"
    times = Counter(c for of in held for c in of)
    if wrong := sorted(set(times) - set(range(chunks))):
        return f"there is no chunk {wrong[0]}; the {chunks} chunks are 0 to {chunks - 1}"
    if missing := [c for c in range(chunks) if c not in times]:
        return f"chunk {missing[0]} is on no rank"
    if twice := [c for c, n in times.items() if n > 1]:
        return f"chunk {twice[0]} is on {times[twice[0]]} ranks"
    for rank, of in enumerate(held):
        if len(of) != chunks // cp:
            return f"rank {rank} holds {len(of)} chunks; each of {cp} ranks holds {chunks // cp}"
    return None


def _judged(rule: Callable[[list[int], list[list[int]]], str | None] | None = None) -> Accept:
    """Accept a deal that is whole, and follows the rule; what an earlier row has said is not repeated."""

    def accept(answer: Answer) -> str | None:
        work, cp = work_of(answer.inputs["lengths"], answer.inputs["chunk"]), answer.inputs["cp"]
        if found := _whole(answer.value, len(work), cp):
            return found
        return rule(work, [[int(c) for c in of] for of in answer.value]) if rule else None

    return accept


def _balanced(work: list[int], held: list[list[int]]) -> str | None:
    rank, ratio = slowest(work, held)
    if ratio <= SLOWEST:
        return None
    return f"rank {rank} has {ratio:.3f} times the mean number of pairs; at most {SLOWEST} is asked"


def _packed(draw: Draw) -> dict[str, Any]:
    """Draw documents of all lengths, at least 16 chunks for each rank, and a deal below 1.02."""
    while True:
        cp, chunk = draw.choice([2, 3, 4]), draw.integer(5, 12)
        s = cp * chunk * draw.integer(16, 20)
        lengths: list[int] = []
        while (left := s - sum(lengths)) > 0:
            lengths.append(min(left, int(s ** draw.random.uniform(0.4, 0.95))))
        work = work_of(lengths, chunk)
        if slowest(work, there_and_back(work, cp))[1] < SLOWEST - 0.01:
            return {"lengths": lengths, "chunk": chunk, "cp": cp}


_SHOWN = {"lengths": [30, 9, 14, 11], "chunk": 1, "cp": 4}
_FIXED = [
    {"lengths": [40, 333, 7, 180, 16], "chunk": 9, "cp": 4}, {"lengths": [300, 50, 300, 50, 20], "chunk": 8, "cp": 5},
    {"lengths": [57, 3, 200, 124], "chunk": 12, "cp": 2}, {"lengths": [200, 200, 200, 168], "chunk": 8, "cp": 6},
]  # fmt: skip

DEAL = Exercise(
    "deal",
    cases=[
        Case("documents of 30, 9, 14 and 11 tokens, chunks of 1 token, 4 ranks: each chunk on one rank, 16 on each",
             _SHOWN, accept=[_judged()]),
        Case("the same: no rank has more than 1.03 times the mean", _SHOWN, accept=[_judged(_balanced)]),
        Case("other documents", _packed, hidden=True, points=3, fixed=_FIXED, accept=[_judged(_balanced)]),
    ],
    idea="First the work of each chunk: how many keys of its own document does each of its tokens see? Then deal the "
    "heavy ones while there are light ones left to even out what is wrong.",
    hint="Sort the chunks by their work. Deal one to each rank, heaviest first; the next round goes back from the last "
    "rank to the first, so that who got the heaviest of a round gets the lightest of the next.",
)  # fmt: skip
