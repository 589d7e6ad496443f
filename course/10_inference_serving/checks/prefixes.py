"""Lab 10, pages that are there already: which of them a new request can begin with.

Calls are played one after the other on one index. What `known` returns is compared, so any way to keep it will do.
"""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

Calls = list[list[Any]]


def prefixes(size: int, calls: Calls) -> list[list[int]]:
    """What each `known` returns."""
    index, told = dict[tuple[int, ...], int](), list[list[int]]()
    for call, *given in calls:
        if call == "keep":
            tokens, pages = given
            for number, end in enumerate(range(size, len(tokens) + 1, size)):
                index.setdefault(tuple(tokens[:end]), pages[number])
        elif call == "forget":
            index = {beginning: page for beginning, page in index.items() if page != given[0]}
        else:
            told.append(_pages(index, given[0], size))
    return told


def _pages(index: dict[tuple[int, ...], int], tokens: list[int], size: int) -> list[int]:
    pages: list[int] = []
    while (end := (len(pages) + 1) * size) < len(tokens) and tuple(tokens[:end]) in index:
        pages.append(index[tuple(tokens[:end])])
    return pages


def _drive(exercise: Any, size: int, calls: Any) -> Any:
    index, told = exercise.Prefixes(size), []
    for call, *given in calls:
        if call == "known":
            told.append([int(page) for page in index.known(*given)])
        else:
            getattr(index, call)(*given)
    return told


def _some(draw: Draw) -> dict[str, Any]:
    """Draw an engine's day: requests of few different tokens, so that many begin alike; pages go and come back.

    Only a page behind which no other is known is forgotten: what becomes of those behind it is not asked.
    """
    size, calls, fresh = draw.integer(2, 3), Calls(), list(range(1, 60))
    draw.random.shuffle(fresh)
    index = dict[tuple[int, ...], int]()
    spare: list[int] = []  # pages of which a later one is the copy, or which are not full
    for _ in range(14):
        tokens = [draw.integer(0, 1) for _ in range(draw.integer(1, 4 * size))]
        calls.append(["known", tokens])
        pages = _pages(index, tokens, size) if draw.random.random() < 0.7 else []  # else computed at the same time
        pages = pages + [fresh.pop() for _ in range(-(-len(tokens) // size) - len(pages))]
        calls.append(["keep", tokens, pages])
        for number, page in enumerate(pages):
            beginning = tuple(tokens[: (number + 1) * size])
            if len(beginning) < (number + 1) * size or index.setdefault(beginning, page) != page:
                spare.append(page)
        ends = [one for one in index if not any(other[: len(one)] == one and other != one for other in index)]
        gone = spare.pop() if spare and draw.random.random() < 0.5 else index.pop(draw.choice(ends)) if ends else None
        if gone is not None:
            calls.append(["forget", gone])
            fresh.insert(0, gone)
    return {"size": size, "calls": calls}


_KEPT = ["keep", [1, 2, 3, 4, 5], [7, 3, 9]]
PREFIXES = Exercise(
    "prefixes",
    function="Prefixes",
    reference=prefixes,
    drive=_drive,
    cases=[
        Case("1 2 3 4 5 is kept: 1 2 3 9 begins alike", {"size": 2, "calls": [_KEPT, ["known", [1, 2, 3, 9]]]}),
        Case("1 2 3 4 5 is kept: 9 9 3 4 5, 3 4 5 and 1 2 8 come", {"size": 2, "calls": [
            _KEPT, ["known", [9, 9, 3, 4, 5]], ["known", [3, 4, 5]], ["known", [1, 2, 8]]]}),
        Case("1 2 3 4 5 is kept: 1 2 3 4 comes, then 1 2 3 4 5 6 7", {"size": 2, "calls": [
            _KEPT, ["known", [1, 2, 3, 4]], ["known", [1, 2, 3, 4, 5, 6, 7]]]}),
        Case("others; pages are forgotten, and taken again", _some, points=2, hidden=True, draws=6, fixed=[
            {"size": 2, "calls": [  # the copy goes, the older page stays
                ["keep", [1, 2, 3], [4, 5]], ["keep", [1, 2, 6], [8, 9]], ["known", [1, 2, 3]], ["forget", 8],
                ["known", [1, 2, 3]]]},
            {"size": 2, "calls": [_KEPT, ["keep", [8, 8, 6], [4, 2]], ["known", [8, 8, 3, 4, 1]]]},
            {"size": 2, "calls": [_KEPT, ["forget", 3], ["known", [1, 2, 3, 4, 5]], ["keep", [8, 8, 6], [3, 2]],
                                  ["known", [1, 2, 3, 4, 5]], ["known", [8, 8, 1]]]},
            {"size": 2, "calls": [  # both were computed at the same time: two copies, and a page that follows them
                _KEPT, ["keep", [1, 2, 3, 4, 5, 6, 7], [8, 2, 4, 6]], ["known", [1, 2, 3, 4, 5, 6, 9]]]},
            {"size": 2, "calls": [_KEPT, ["forget", 7], ["known", [1, 2, 3, 4, 5]]]},
            {"size": 2, "calls": [  # page 3 still has what it had, and follows other tokens than before
                _KEPT, ["forget", 7], ["keep", [8, 8, 6], [7, 2]], ["known", [8, 8, 3, 4, 1]]]},
            {"size": 2, "calls": [["keep", [1, 2, 3, 4], [0, 5]], ["known", [1, 2, 3, 4, 5]], ["known", [1, 2, 9]]]},
            {"size": 2, "calls": [["keep", [1, 12, 5], [4, 6]], ["known", [11, 2, 5]], ["known", [1, 12, 7]]]},
            {"size": 2, "calls": [["keep", [1, 2, 3, 4], [5, 6]], ["known", [2, 1, 4]], ["known", [1, 2, 4, 3, 5]]]},
            {"size": 3, "calls": [["known", [1, 2, 3, 4]], ["keep", [1], [2]], ["known", [1]]]},
            {"size": 1, "calls": [["keep", [5, 5, 5], [1, 2, 3]], ["known", [5, 5, 5, 5]], ["known", [5]]]},
            lambda draw: _some(Draw(f"{draw.integer(0, 9)}"))]),
    ],
    errors={
        "KeyError": "A page that is forgotten may never have been known: it was not full, or a copy.",
        "'int' object is not iterable": "`known` returns the pages themselves, in a list.",
        "unhashable": "A list cannot be the key of a dict; a tuple can.",
    },
    idea="Two questions: what do the keys in a page depend on, and what is the first token of an answer made of?",
    hint="A dict from the whole beginning, tuple(tokens[:end]) for end = size, 2 size, ..., to the page. keep: "
    "setdefault for each full page. known: from the front, while end < len(tokens) and the beginning is there. "
    "forget: remove what leads to this page.",
)  # fmt: skip
