"""A verdict's note in the language of the labs.

    in_words("rank 0: dq is wrong (its shape); the inputs and answers of this case stay hidden")
                                                  'rank 0：dq 不对（形状）；这个用例的输入和答案保持隐藏'

The judge (`deciding`, `compare`, `parts`, `settings`, `checks`) writes notes in English, of few phrases, and a record
keeps them so. The phrases are those of `WORDS` that begin with `note-`, tried in the order in which they stand there:

| phrases            | are looked for                                                        |
|--------------------|-----------------------------------------------------------------------|
| `part`, `whole`... | where the note ends with `note-hidden`: a lab's judge, too, says wrong |
| `got`, `at`...     | everywhere                                                            |
| `with`             | at the beginning                                                      |
| all others         | before the first value that is shown                                  |

The words of Python's errors, values, and sentences of a lab's own judges stay as they are.
"""

from __future__ import annotations

import functools
import re

from labkit.said import WORDS, say

_PREFIX = "note-"
_OF_PARTS = ("part", "whole", "way", "hidden")
_AROUND_VALUES = ("got", "at", "differ", "missing", "more", "also")
_AT_THE_START = ("with",)
_FIELDS = {"count": r"\d+", "all": r"\d+", "next": r"\d+", "call": r"\w+", "got": ".+?"}
_NAMES = "[^();:]+?"  # what all other fields hold: a name, or some
_ERROR = re.compile(r"\b[A-Za-z]\w*(?:Error|Exception|Interrupt|Exit)\b")
_VALUE = re.compile(r"\bgot ")


def in_words(note: str) -> str:
    """The note with the phrases that are known in the language of the labs; in English it is unchanged."""
    if note.endswith(WORDS["note-hidden"]):
        return _said(note, set(_patterns()))
    error, value = _ERROR.search(note), _VALUE.search(note)
    end = error.start() if error else len(note)
    middle = min(value.start(), end) if value else end
    before = _said(note[:middle], set(_patterns()).difference(_OF_PARTS))
    return before + _said(note[middle:end], set(_AROUND_VALUES)) + note[end:]


def _said(text: str, kinds: set[str]) -> str:
    for kind, patterns in _patterns().items():
        for name, pattern in patterns if kind in kinds else []:
            text = pattern.sub(functools.partial(_phrase, name), text)
    return text


def _phrase(name: str, match: re.Match[str]) -> str:
    return say(name, **match.groupdict())


@functools.cache
def _patterns() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """{kind: [(name, pattern) of each phrase]}: the kind of `note-part-way` is `part`."""
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, text in WORDS.items():
        if name.startswith(_PREFIX):
            kind = name.removeprefix(_PREFIX).split("-")[0]
            pattern = r"\A" * (kind in _AT_THE_START) + re.sub(r"\\\{(\w+)\\\}", _field, re.escape(text))
            found.setdefault(kind, []).append((name, re.compile(pattern)))
    return found


def _field(match: re.Match[str]) -> str:
    return f"(?P<{match[1]}>{_FIELDS.get(match[1], _NAMES)})"
