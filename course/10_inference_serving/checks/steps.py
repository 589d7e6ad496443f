"""Lab 10, a step's plan: which tokens of which sequences are computed together, and who loses its pages."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

Row = dict[str, Any]


def _pages(tokens: int, size: int) -> int:
    return -(-tokens // size)


def schedule(running: list[Row], waiting: list[Row], budget: int, seats: int, free: int, size: int) -> dict[str, Any]:
    chunks, preempted, left = list[tuple[str, int]](), list[str](), list(running)
    i = 0
    while i < len(left):
        one, count = left[i], min(left[i]["tokens"] - left[i]["computed"], budget)
        more = _pages(one["computed"] + count, size) - one["pages"] if count else 0
        while free < more and i < len(left):
            victim = left.pop()
            free += victim["pages"]
            preempted.append(victim["name"])
        if count and i < len(left):
            free, budget = free - more, budget - count
            chunks.append((one["name"], count))
        i += 1
    for one in [] if preempted else waiting:
        count = min(one["tokens"], budget)
        if not count or i >= seats or free < _pages(one["tokens"] + 1, size):
            break
        free, budget, i = free - _pages(count, size), budget - count, i + 1
        chunks.append((one["name"], count))
    return {"preempted": preempted, "chunks": chunks}


def _row(name: str, tokens: int, computed: int, size: int) -> Row:
    return {"name": name, "tokens": tokens, "computed": computed, "pages": _pages(computed, size)}


def _state(running: list[tuple[int, int]], waiting: list[int], budget: int, seats: int, free: int, size: int) -> Any:
    names = iter("abcdefghijklmnopqrstuvwxyz")
    return {
        "running": [_row(next(names), tokens, computed, size) for tokens, computed in running],
        "waiting": [_row(next(names), tokens, 0, size) for tokens in waiting],
        "budget": budget, "seats": seats, "free": free, "size": size,
    }  # fmt: skip


def _some(draw: Draw, scarce: bool = False) -> Any:
    size, seats = draw.integer(2, 5), draw.integer(3, 6)
    running = []
    for _ in range(draw.integer(2, seats)):
        computed = draw.integer(1, 3 * size)
        left = draw.choice([1, 1, 1, draw.integer(2, 9)])
        running.append((computed + left, computed))
    waiting = [draw.integer(1, 12) for _ in range(draw.integer(1, 4))]
    free = draw.integer(0, 2) if scarce else draw.integer(4, 30)
    return _state(running, waiting, draw.integer(seats, seats + 12), seats, free, size)


def _tight(draw: Draw) -> Any:
    """All pages are full and most sequences need one more: some have to go."""
    size, seats = draw.integer(2, 4), draw.integer(3, 6)
    running = []
    for _ in range(seats):
        computed = size * draw.integer(1, 3) - draw.choice([0, 0, 1])
        running.append((computed + 1, computed))
    return _state(running, [draw.integer(1, 5)], draw.integer(seats, seats + 6), seats + 1, draw.integer(0, 1), size)


_EXAMPLE = _state([(9, 8), (6, 5)], [7, 3], 6, 4, 5, 4)
_SCARCE = _state([(9, 8), (5, 4), (4, 3)], [2], 6, 4, 0, 4)
_FIXED = [
    _state([], [8, 4], 16, 4, 3, 4),  # two pages are taken, and one is no longer enough
    _state([(5, 4)], [4, 9], 8, 8, 9, 4),  # the second prompt in part
    _state([(20, 4), (6, 5)], [3], 8, 4, 9, 4),  # the oldest reads its prompt, and takes all
    _state([(5, 4), (5, 4)], [3], 8, 2, 9, 4),  # no seat
    _state([(5, 4)], [8, 1], 12, 4, 3, 4),  # pages for 8 tokens and not for the next: nobody passes by
    _state([(5, 4)], [7, 1], 12, 4, 3, 4),  # ... for 7 and the next
    _state([], [8, 3], 4, 4, 9, 4),  # a chunk takes pages for itself alone
    _state([], [7, 7], 16, 4, 5, 4),
    _state([], [5, 2, 2], 16, 4, 3, 4),
    _state([(4, 3)], [6], 1, 1, 9, 4),
    _state([], [], 4, 4, 4, 4),
    _state([(6, 5), (9, 4)], [2, 2], 4, 3, 9, 4),
    _state([], [3, 6, 9], 6, 6, 7, 3),
    _state([], [6, 2], 3, 4, 3, 4),
    _state([], [4, 3], 16, 4, 2, 4),  # a full page is taken, and the next one only asked for
    _state([(4, 3), (6, 5)], [], 4, 4, 0, 4),  # both have a row left
    _state([], [1, 1, 1], 8, 2, 9, 4),  # those that are admitted take the seats
    _state([], [9], 4, 4, 2, 4),  # pages for a chunk, and not for all
    _state([(5, 4)], [11], 5, 4, 3, 4),
]
_FIXED_SCARCE = [
    _state([(5, 4)], [1], 4, 4, 0, 4),  # it loses its own
    _state([(13, 12), (5, 4), (9, 8)], [1], 8, 4, 0, 4),  # the last one's two pages are enough for both
    _state([(9, 8), (9, 8), (3, 2)], [1], 8, 4, 0, 4),  # one page: a, not b, which goes itself
    _state([(9, 8), (5, 4), (5, 4), (5, 4)], [], 8, 4, 1, 4),
    _state([(8, 4), (5, 4), (5, 4)], [1], 8, 4, 0, 2),  # two pages: those of the newest are enough
    _state([(8, 4), (3, 2), (3, 2)], [1], 8, 4, 0, 2),  # two pages: two have to go
    _state([(13, 4), (9, 8), (4, 3), (5, 4), (5, 4)], [], 12, 8, 0, 4),  # three pages: three have to go
    _state([(4, 3), (9, 8)], [1, 1], 8, 8, 0, 4),
    _state([(21, 4), (8, 7)], [1], 8, 4, 1, 4),  # a chunk whose pages are another's
    _state([(20, 4), (5, 4)], [1], 4, 4, 1, 4),  # no budget, so no page is wanted
    _state([(6, 4), (3, 2), (8, 7)], [1], 8, 4, 0, 4),
    _state([(4, 3), (21, 4)], [], 20, 4, 1, 4),  # it goes itself, and nobody older
    _state([(12, 4), (4, 3), (3, 2)], [], 12, 4, 1, 4),  # what was free counts, too
]  # fmt: skip

_COUNTS = "A row's tokens, computed and pages are counts, and so are budget, seats, free and size: numbers, not lists."
SCHEDULE = Exercise(
    "schedule",
    reference=schedule,
    cases=[
        Case("the example: two generate, two wait", _EXAMPLE),
        Case("no page is free, and a needs one", _SCARCE),
        Case("other steps with pages enough for who runs", _some, points=2, hidden=True, fixed=_FIXED),
        Case("other steps, pages run out", _tight, points=2, hidden=True, fixed=[
            *_FIXED_SCARCE, lambda draw: _some(draw, scarce=True)]),
    ],
    errors={
        "KeyError": "A row has the keys name, tokens, computed and pages.",
        "type 'int' has no len()": _COUNTS,
        "'int' object is not iterable": _COUNTS,
        "'int' object is not subscriptable": _COUNTS,
    },
    idea="First those that run, oldest first; then those that wait, until one of four things is used up.",
    hint="For each that runs: count = min(tokens - computed, budget); more = ceil((computed + count) / size) - pages; "
    "while free < more: pop the last of those that run, add its pages to free. Then, if nobody was preempted, for each "
    "that waits: stop without budget, seat or ceil((tokens + 1) / size) pages; else take min(tokens, budget) tokens.",
)  # fmt: skip
