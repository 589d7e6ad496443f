"""Lab 03, schedules as lists: the lists to which misreadings of the text lead, each with its hint.

There are several right lists, but a wrong list that many learners write is recognised by its words. Each entry makes
the list of one rank; where a learner's lists equal it for all sizes of a case, its hint is printed.

    warm-up        which formula of rank, p, m, v
    order          of the backwards, of the groups, of the chunks
    delay          of W behind B, in microbatches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.exercises import Mistake

Words = list[str]
Ahead = Callable[[int, int, int], int]  # of rank, p, m: how many forwards a rank does first
AheadOfChunks = Callable[[int, int, int, int], int]  # of rank, p, m, v


def _misread(words: Callable[..., Words], hint: str) -> Mistake:
    """Make an entry: the lists of all ranks for each of the sizes, as the exercises' drive asks for them, and the
    hint."""

    def lists(function: str, sizes: Any) -> list[list[Words]]:
        return [[words(rank, **one) for rank in range(one["p"])] for one in sizes]

    return Mistake(lists, hint)


def _in_turn(forward: Words, backward: Words, ahead: int) -> Words:
    """A list of `ahead` forwards, then a forward and a backward in turn, then the other backwards."""
    ahead = min(ahead, len(forward))
    pairs = [word for pair in zip(forward[ahead:], backward, strict=False) for word in pair]
    return [*forward[:ahead], *pairs, *backward[len(forward) - ahead :]]


def _numbered(kind: str, microbatches: Sequence[int] | range) -> Words:
    return [f"{kind}{i}" for i in microbatches]


# -------------------------------------------------------------------------------------------------- GPipe, 1F1B


def _one_by_one(rank: int, p: int, m: int) -> Words:
    return [word for i in range(m) for word in (f"F{i}", f"B{i}")]


def _in_rounds(of: Callable[[int, int], int]) -> Callable[..., Words]:
    """Lists in rounds: some forwards, then their backwards, and so on."""

    def words(rank: int, p: int, m: int) -> Words:
        size = of(rank, p)
        rounds = [range(first, min(first + size, m)) for first in range(0, m, size)]
        return [word for one in rounds for kind in "FB" for word in _numbered(kind, one)]

    return words


def _warming_up(ahead: Ahead) -> Callable[..., Words]:
    return lambda rank, p, m: _in_turn(_numbered("F", range(m)), _numbered("B", range(m)), ahead(rank, p, m))


def _newest_first(left: Callable[[int, int], Sequence[int]], own: bool) -> Callable[..., Words]:
    """1F1B lists whose backwards come in another order.

    Args:
        left: from warm-up and m, the microbatches of the last backwards.
        own: in turn a forward and the backward of the same microbatch.
    """

    def words(rank: int, p: int, m: int) -> Words:
        ahead = min(m, p - rank - 1)
        first = range(ahead, m) if own else range(m - ahead)
        return _in_turn(_numbered("F", range(m)), _numbered("B", [*first, *left(ahead, m)]), ahead)

    return words


_ORDER = (
    "A newer microbatch goes back here while an older one still waits. Microbatches go back in the order they came."
)

GPIPE = [
    _misread(_one_by_one, "Here each microbatch goes back before the next one begins, so only one is ever under way."),
]

ONE_F_ONE_B = [
    _misread(_one_by_one, "Here every rank does F0 B0, F1 B1, ...: no rank warms up, and one microbatch is under way."),
    _misread(_warming_up(lambda rank, p, m: m), "This is GPipe: every rank does all its forwards first."),
    _misread(
        _warming_up(lambda rank, p, m: rank),
        "Rank r warms up with r forwards here, the last rank longest. But the first gradient comes from the last rank.",
    ),
    _misread(
        _warming_up(lambda rank, p, m: p - 1),
        "Every rank warms up with p-1 forwards here, also the last, which could go back at once.",
    ),
    _misread(
        _warming_up(lambda rank, p, m: p - rank),
        "Each rank warms up with one forward more than it has hops to the last rank, and then does another forward.",
    ),
    _misread(
        _warming_up(lambda rank, p, m: max(1, p - rank - 1)),
        "Here the last rank warms up, too, though it could go back right after F0.",
    ),
    _misread(
        _warming_up(lambda rank, p, m: 2 * (p - rank - 1)),
        "Each rank warms up with twice as many forwards as it has hops to the last rank.",
    ),
    *(_misread(_in_rounds(of), "Here a round of forwards and a round of backwards take turns: with every round the "
               "pipeline drains and fills again.") for of in (lambda rank, p: p, lambda rank, p: p - rank)),
    *(_misread(_newest_first(left, own), _ORDER) for left, own in (
        (lambda ahead, m: range(ahead), True),
        (lambda ahead, m: range(ahead)[::-1], True),
        (lambda ahead, m: range(m - ahead, m)[::-1], False),
    )),
]  # fmt: skip

# -------------------------------------------------------------------------------------------------- interleaved


def _chunks(
    ahead: AheadOfChunks = lambda rank, p, m, v: 2 * (p - rank - 1) + (v - 1) * p, *,
    group: Callable[[int, int, int], int] = lambda p, m, v: p, last_chunk_first: bool = True,
    word: str = "{kind}{microbatch}.{chunk}",
) -> Callable[..., Words]:  # fmt: skip
    """The interleaved list with one thing changed: the warm-up, the size of a group, or the chunks of the backward."""

    def words(rank: int, p: int, m: int, v: int) -> Words:
        size = group(p, m, v)
        groups = [range(first, min(first + size, m)) for first in range(0, m, size)]
        table = [(i, c) for one in groups for c in range(v) for i in one]
        back = [(i, v - 1 - c if last_chunk_first else c) for i, c in table]
        forward, backward = (
            [word.format(kind=kind, microbatch=i, chunk=c) for i, c in slots]
            for kind, slots in (("F", table), ("B", back))
        )
        return _in_turn(forward, backward, ahead(rank, p, m, v))

    return words


_TOO_EARLY = (
    "On the last rank this warm-up ends before microbatch 0 has passed the last chunk, so no backward can begin."
)

INTERLEAVED = [
    _misread(
        _chunks(last_chunk_first=False),
        "The backward takes the chunks in the order of the forward here. A gradient comes out of the last chunk first.",
    ),
    _misread(
        _chunks(group=lambda p, m, v: m),
        "Here all m microbatches pass chunk 0 before the first of them passes chunk 1: the groups are too large.",
    ),
    _misread(
        _chunks(group=lambda p, m, v: 1),
        "Here a microbatch passes all chunks before the next one begins: the groups are too small.",
    ),
    _misread(_chunks(group=lambda p, m, v: v), "The groups have v microbatches here: v counts chunks, not ranks."),
    _misread(
        _chunks(word="{kind}{chunk}.{microbatch}"),
        "F2.1 is microbatch 2 in chunk 1. Here the chunk comes before the point and the microbatch behind it.",
    ),
    *(_misread(_chunks(ahead), _TOO_EARLY) for ahead in (
        lambda rank, p, m, v: 2 * (p - rank - 1),
        lambda rank, p, m, v: p - rank - 1,
        lambda rank, p, m, v: v * (p - rank - 1),
    )),
    _misread(
        _chunks(lambda rank, p, m, v: 2 * rank + (v - 1) * p),
        "The warm-up grows with the rank here. But rank 0 is the farthest from the last rank.",
    ),
    _misread(
        _chunks(lambda rank, p, m, v: 2 * (p - 1) + (v - 1) * p),
        "All ranks warm up with the same number of forwards here, though their distances to the last rank differ.",
    ),
    *(_misread(_chunks(ahead), f"Each rank warms up with {more} more than asked.") for ahead, more in (
        (lambda rank, p, m, v: 2 * (p - rank - 1) + (v - 1) * p + 1, "one forward"),
        (lambda rank, p, m, v: 2 * (p - rank) + (v - 1) * p, "two forwards"),
        (lambda rank, p, m, v: 2 * (p - rank - 1) + v * p, "a whole group of p forwards"),
    )),
    _misread(
        _chunks(lambda rank, p, m, v: 2 * (p - rank - 1) + (v - 1) * m),
        "The warm-up grows with m here: it takes whole batches through the first chunks in place of one group.",
    ),
    _misread(
        _chunks(lambda rank, p, m, v: min(m, 2 * (p - rank - 1) + (v - 1) * p)),
        "The warm-up is cut off at m forwards here; a rank has m forwards in each of its chunks.",
    ),
    _misread(
        _chunks(lambda rank, p, m, v: m * v if m == p else 2 * (p - rank - 1) + (v - 1) * p),
        "Where m = p, all forwards come first here; the warm-up is shorter than that, also for one group.",
    ),
    _misread(_chunks(lambda rank, p, m, v: m * v), "This is GPipe with chunks: all forwards come first."),
]  # fmt: skip

# -------------------------------------------------------------------------------------------------------- ZB-H1


def _delayed(by: Ahead, ahead: Ahead = lambda rank, p, m: p - rank - 1) -> Callable[..., Words]:
    """1F1B lists in which each W comes `by` microbatches after its B; the remaining Ws stand at the end."""

    def words(rank: int, p: int, m: int) -> Words:
        delay = min(m, max(0, by(rank, p, m)))
        backward = range(m)
        said: Words = []
        for word in _in_turn(_numbered("F", range(m)), _numbered("B", backward), ahead(rank, p, m)):
            said.append(word)
            if word[0] == "B" and int(word[1:]) >= delay:
                said.append(f"W{int(word[1:]) - delay}")
        return [*said, *_numbered("W", range(m - delay, m))]

    return words


def _words_later(rank: int, p: int, m: int) -> Words:
    """A list in which each W comes r words after its B."""
    said, due = Words(), list[tuple[int, str]]()
    for place, word in enumerate(_in_turn(_numbered("F", range(m)), _numbered("B", range(m)), p - rank - 1)):
        said.append(word)
        if word[0] == "B":
            due.append((place + rank, f"W{word[1:]}"))
        while due and due[0][0] <= place:
            said.append(due.pop(0)[1])
    return [*said, *(word for _, word in due)]


ZB_H1 = [
    _misread(
        _delayed(lambda rank, p, m: 0),
        "Every rank does W right after B here, so a gradient waits for the W of all ranks that it passes later.",
    ),
    _misread(
        _delayed(lambda rank, p, m: m),
        "All W come at the end here, so every rank keeps the activations of all its microbatches until then.",
    ),
    _misread(
        _delayed(lambda rank, p, m: p - 1 - rank),
        "Rank 0 puts its W off longest here and the last rank not at all. But the last rank is the first to go back.",
    ),
    _misread(
        _delayed(lambda rank, p, m: p - 1),
        "Every rank puts its W off by p-1 microbatches here. How long it may wait depends on the rank.",
    ),
    _misread(
        _delayed(lambda rank, p, m: p - 1 if rank == p - 1 else 0),
        "Only the last rank puts its W off here; those between do it at once.",
    ),
    _misread(_delayed(lambda rank, p, m: rank + 1), "Each W comes one microbatch later than asked."),
    _misread(_delayed(lambda rank, p, m: rank - 1), "Each W comes one microbatch earlier than asked."),
    _misread(_words_later, "Each W comes r *words* behind its B here; asked are r microbatches."),
    *(_misread(_delayed(lambda rank, p, m: rank, ahead), "The F and B are not those of 1F1B: the warm-up differs.")
      for ahead in (lambda rank, p, m: 2 * (p - rank - 1), lambda rank, p, m: p - rank, lambda rank, p, m: p - 1,
                    lambda rank, p, m: m)),
]  # fmt: skip
