"""Lab 11, which labels of a conversation count: those that the model itself would generate."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

# Ids of the cases: the special tokens open a turn (1) and end one (2), then the words of roles, and a newline.
OPEN, END, USER, ASSISTANT, NEWLINE = 1, 2, 3, 4, 5


def spoken(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """By places: from behind each opening to the first end there."""
    counts = set[int]()
    for at in range(len(ids) - len(opening) + 1):
        if ids[at : at + len(opening)] == opening:
            first = at + len(opening)
            stop = ids.index(end, first) if end in ids[first:] else len(ids) - 1
            counts |= set(range(first, stop + 1))
    return [at in counts for at in range(1, len(ids))]


def chat(*turns: tuple[int, list[int]]) -> list[int]:
    """A conversation of (role, content) as ids: open, role, newline, content, end, newline."""
    return [token for role, content in turns for token in (OPEN, role, NEWLINE, *content, END, NEWLINE)]


_OPENING = [OPEN, ASSISTANT, NEWLINE]


def _case(ids: list[int], opening: list[int] | None = None) -> dict[str, Any]:
    return {"ids": ids, "opening": opening or _OPENING, "end": END}


def _some(draw: Draw) -> dict[str, Any]:
    """Words of roles and newlines stand in contents, too; the last turn may be cut; an opening has one to three ids."""
    opening = draw.choice([_OPENING, [OPEN, ASSISTANT], [ASSISTANT]])
    words = [6, 7, 8, NEWLINE, USER, *([ASSISTANT] if len(opening) > 1 else [])]
    ids: list[int] = []
    for _ in range(draw.integer(2, 5)):
        ids += [OPEN, USER, NEWLINE, *draw.random.choices(words, k=draw.integer(0, 5)), END, NEWLINE]
        ids += [*opening, *draw.random.choices(words, k=draw.integer(0, 5)), END, *[NEWLINE] * draw.integer(0, 1)]
    return _case(ids[: len(ids) - draw.integer(0, 4)], opening)


_FIXED = [
    _case(chat((USER, [6]), (ASSISTANT, []), (USER, [7]), (ASSISTANT, [8, 9]))),  # an empty answer
    _case(chat((USER, [ASSISTANT, NEWLINE, 6]), (ASSISTANT, [7]))),  # a user who says the word
    _case(chat((USER, [6]), (ASSISTANT, [ASSISTANT, NEWLINE, 7]))),  # a model that says it
    _case(chat((USER, [6]), (ASSISTANT, [7]), (ASSISTANT, [8]))),  # two answers, one behind the other
    _case(chat((ASSISTANT, [7, 8]))),  # no prompt: the first answer begins the text
    _case(chat((USER, [6]), (ASSISTANT, [7, 8, 9]))[:-3]),  # cut in an answer
    _case(chat((USER, [6, 7]))),
    _case([ASSISTANT, 7, END, 8, ASSISTANT, 9, END], [ASSISTANT]),
    _case(_OPENING),
    _case([OPEN, USER, NEWLINE, 6]),
    _case([6]),
    _case([NEWLINE, 7, 8, OPEN, ASSISTANT, NEWLINE, 9]),  # behind the end of an opening that is not there
    _case([7, END, OPEN, ASSISTANT, NEWLINE, 9, END, NEWLINE, 8, END]),
]
SPOKEN = Exercise(
    "spoken",
    reference=spoken,
    cases=[
        Case("the example: open, assistant, newline = 1 4 5, the end is 2", _case(
            [1, 3, 5, 6, 2, 5, 1, 4, 5, 7, 8, 2, 5])),
        Case("two questions, two answers", _case(
            chat((USER, [6]), (ASSISTANT, [7]), (USER, [8]), (ASSISTANT, [9, 9])))),
        Case("other conversations", _some, points=2, hidden=True, draws=6, fixed=_FIXED),
    ],
    errors={"is not in list": "There may be no opening, and an answer may have no end: index raises an error then."},
    idea="Which tokens did the model choose itself when it answered, from the first to the one that stopped it?",
    hint="Walk through ids with a flag. While it is set, the id counts, and the end unsets it. Unset: if the ids up to "
    "here end with opening, set it. At the end drop the first entry: a label is the next id.",
)  # fmt: skip
