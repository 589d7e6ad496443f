"""What the quiz, guesses and verdicts say, in the language of a learner's labs.

    say("was-that", "zh")               '你刚才说的是这个答案吗？[y/n]'
    say("todo")                         'not done yet', or in the language of the labs in this folder

The English is here; other languages are in `said.zh.md`, under marks as the translations of labs are, and
`labkit/languages` checks them. Words that begin with `note-` are the phrases of notes (`notes`). Chinese characters are
two columns wide on a terminal: `padded` and `wrapped` count so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from minimegatron.commands.my_labs import FOLDER, SAID_IN, language_of
from minimegatron.commands.prose import ENGLISH, Translation, Which, in_language, read

WORDS = {
    "todo": "not done yet",
    "wrong": "not right yet",
    "passed": "passed",
    "mistake": "mistake",
    "idea": "idea",
    "later": "(the second try shows an idea)",
    "hint": '`hint("{exercise}")` says how',
    "first": "run its cell, %%exercise {exercise}, first",
    "as-in": "as in `{case}`",
    "lab": "lab {lab}",
    "points": "{points} of {of} points",
    "next": "next:",
    "loaded": "your exercises are loaded: {names}; go on where you were",
    "below": "{name} uses {names}, changed since it passed: check it again",
    "waits": "this cell waits for exercise {exercise}",
    "waits-wrong": '{waits}, which is not right yet ({points}): see check("{exercise}")',
    "no-guess": "no guess yet: put a number in place of None",
    "bad-guess": "{value} is no number: write one in its place, for example 12",
    "guess": "your guess: {value}",
    "guessed": "it is {measured}; you guessed {value}",
    "unguessed": "it is {measured}; you made no guess",
    "basic": "basic",
    "intermediate": "intermediate",
    "advanced": "advanced",
    "of-a-lab": "answer the questions of {title}",
    "list": "{level}: {done} of {count}",
    "turn": "{i} of {count} · {level} · {can}",
    "aloud": "Say it aloud, then press Enter.",
    "was-that": "Was that your answer? [y/n]",
    "no-number": (
        "`{typed}` is no number; type one, or how to compute it (2 * 640 * 7 / 8); an empty line: I do not know"
    ),
    "yes": "Yes: {answer}. How: {how}.",
    "no": "No: {answer}. How: {how}.",
    "not-due": "Nothing is due today. --again asks all the same.",
    "until": "Until next time: {right} of {count} answered.",
    "end": "{right} of {count} answered. --list shows how far you are.",
    # phrases of notes (`notes`), in the order in which they are tried
    "note-part-way": "{name} is wrong ({way})",
    "note-part": "{name} is wrong",
    "note-part-more": ", and {count} more",
    "note-whole-way": "wrong ({way}); the inputs and answers of this case stay hidden",
    "note-whole": "wrong; the inputs and answers of this case stay hidden",
    "note-hidden": "; the inputs and answers of this case stay hidden",
    "note-way-keys": "keys are missing",
    "note-way-other-keys": "it has other keys",
    "note-way-no-dict": "it is no dict",
    "note-way-none": "it is None",
    "note-way-no-tensor": "it is no tensor",
    "note-way-shape": "its shape",
    "note-way-length": "its length",
    "note-way-nan": "it holds NaN",
    "note-changes": "it changes its input `{name}`: compute on a copy",
    "note-brings": "rank {rank} never waits for its {call}: what it brings may not be there when it is used",
    "note-form": "the answer has not the form that was asked for",
    "note-not-tried": "not tried after that",
    "note-returned": "has returned",
    "note-strided": "with inputs that are not contiguous: ",
    "note-double": "with inputs of float64: ",
    "note-smaller": "with a group smaller than the world: ",
    "note-round-robin": "with chunks round robin: ",
    "note-on-a-v": "; on a V it cannot run either",
    "note-others": "{count} more",
    "note-is-none": " is no number, expected ",
    "note-is": "{name} is {got}, expected ",
    "note-with": "with {given}: ",
    "note-every-rank": "every rank: ",
    "note-rank": "rank {rank}: ",
    "note-ranks": "ranks {rank}: ",
    "note-at": "at [{place}]: ",
    "note-got-keys": "got the keys {got}, expected ",
    "note-got-items": "got {count} items, expected ",
    "note-got-dtype": "got dtype {got}, expected ",
    "note-got-tensor": "got a tensor [{shape}], expected [",
    "note-got": "got {got}, expected ",
    "note-differ": " ({count} of {all} differ)",
    "note-result": "{name}'s result",
    "note-missing": "missing: ",
    "note-more": "not asked for: ",
    "note-also": "also wrong: ",
}
_CHINESE, _MARKS = "\u2e80-\u9fff\uff00-\uffef", "[，。、；：？！）」』”…]*"
_TOGETHER = re.compile(rf"\s+|[{_CHINESE}]{_MARKS}|[^\s{_CHINESE}]+{_MARKS}")


def language(folder: Path | None = None) -> str:
    """The language of the labs of this folder, or of its `my-labs/`."""
    if SAID_IN in os.environ:
        return os.environ[SAID_IN]
    with contextlib.suppress(OSError):  # a folder that is gone, or cannot be read
        here = folder or Path.cwd()
        return next((one for place in (here, here / FOLDER) if (one := language_of(place)) != ENGLISH), ENGLISH)
    return ENGLISH


def say(name: str, of: str = "", /, **fields: object) -> str:
    """One of `WORDS` in a language ("": that of the labs), with its fields."""
    return in_language(_translated(of or language()), Which("word", name), WORDS[name]).format(**fields)


@functools.cache
def _translated(of: str) -> Mapping[Which, Translation]:
    return read(Path(__file__).with_name(f"said.{of}.md"))


def columns(text: str) -> int:
    """The width of a text on a terminal."""
    return sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def padded(text: str, width: int) -> str:
    """A text with blanks up to this width."""
    return text + " " * (width - columns(text))


def wrapped(text: str, width: int = 100) -> str:
    """A text in lines of this width, which end at a blank or between Chinese characters, and begin with no mark."""
    lines = [""]
    for piece in _TOGETHER.findall(text):
        if columns(lines[-1] + piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece if lines[-1] or not piece.isspace() else ""
    return "\n".join(line.rstrip() for line in lines)
