"""The result of `check`: a mark, a small table, one thing to think about. The same text every time for the same code.

The three states are distinguished by shape and word, not by colour alone::

    ○ ring_all_reduce   not done yet     0/5

    ✘ ring_all_reduce   not right yet    1/5
      ✔ two ranks, two numbers           1/1
      ✘ other sizes, up to four ranks    0/4  rank 1: got 3.0, expected 6.0
      mistake: this is the mean; an all-reduce with op=sum does not divide.

    ✔ ring_all_reduce   passed           5/5

A note that several rows share is printed once; the others name that row.

Below the table is what helps at this failure of the exercise (`Verdict.said`; `record` counts):

| failure          | shown                                                                                       |
|------------------|---------------------------------------------------------------------------------------------|
| first            | what the mistake is, where it is known                                                      |
| second and later | that, the idea (one sentence that points the way), and that `hint("name")` says the rest    |
| not counted      | what the mistake is, and the idea (grading, nbgrader)                                       |

A cell that Python or a compiler cannot read, or that has no function of this name, is no try and counts as none.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.notes import in_words, with_sentences
from labkit.said import WORDS, columns, padded, say
from labkit.shown import clean

IDEA_FROM = 2  # the failure that shows the idea
SIGNS = {"todo": "○", "wrong": "✘", "passed": "✔"}
_COLOURS = {
    "todo": "--jp-ui-font-color2, #616161",
    "wrong": "--jp-error-color1, #c62828",
    "passed": "--jp-success-color1, #2e7d32",
}
_CELL = 'style="text-align:left;vertical-align:top;padding:1px 10px 1px 0"'


@dataclasses.dataclass(frozen=True)
class Row:
    """One case: what was tried, its points, and what went wrong, cleaned (`shown`)."""

    what: str
    points: int
    of: int
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "note", clean(self.note))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one exercise.

    Attributes:
        exercise: its name.
        state: `todo`, `wrong` or `passed`.
        of: its points.
        rows: one a case; [] if it is not done.
        note: one line about the whole, e.g. an error that came before any case, cleaned.
        mistake: the mistake, if it is known, cleaned.
        idea: of a wrong exercise, cleaned.
        attempt: how many different texts of the cell have failed since it last passed; 0 if this is not counted.
        tried: False if the cell could not be read, or has no such function: then it is no try.
    """

    exercise: str
    state: str
    of: int
    rows: tuple[Row, ...] = ()
    note: str = ""
    mistake: str = ""
    idea: str = ""
    attempt: int = 0
    tried: bool = True

    def __post_init__(self) -> None:
        for name in ("note", "mistake", "idea"):
            object.__setattr__(self, name, clean(getattr(self, name)))

    @property
    def points(self) -> int:
        return sum(row.points for row in self.rows)

    @property
    def passed(self) -> bool:
        return self.state == "passed"

    def to_plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rows": [dataclasses.astuple(row) for row in self.rows]}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Verdict:
        known = {field.name for field in dataclasses.fields(cls)}  # one that an earlier version has kept may have more
        rows = tuple(Row(*row) for row in data["rows"])
        return cls(**{**{name: value for name, value in data.items() if name in known}, "rows": rows})

    @property
    def said(self) -> list[tuple[str, str]]:
        """(label, text) of the lines below the table at this attempt."""
        if self.state != "wrong" or not self.tried:
            return []
        said = [(say("mistake"), self.mistake)] if self.mistake else []
        if self.idea and not 0 < self.attempt < IDEA_FROM:
            said.append((say("idea"), self.idea))
        if self.attempt >= IDEA_FROM:
            said.append(("", say("hint", exercise=self.exercise)))
        return said or ([("", say("later"))] if self.idea else [])

    def with_cases(self, whats: Sequence[str]) -> Verdict:
        """The same with the texts of the cases in another language, where there is one for each."""
        if len(whats) != len(self.rows):
            return self
        rows = (dataclasses.replace(row, what=what) for row, what in zip(self.rows, whats, strict=True))
        return dataclasses.replace(self, rows=tuple(rows))

    def with_mistake(self, said: Mapping[str, str]) -> Verdict:
        """The same with the mistake in another language, {English: translated}, where it is there."""
        there = {clean(english): text for english, text in said.items()}
        return dataclasses.replace(self, mistake=there.get(self.mistake, self.mistake))

    def with_sentences(self, said: Mapping[str, str]) -> Verdict:
        """The same with the sentences of the lab's judges in another language, {English: translated}."""
        rows = (dataclasses.replace(row, note=with_sentences(row.note, said)) for row in self.rows)
        return dataclasses.replace(self, rows=tuple(rows), note=with_sentences(self.note, said))

    @property
    def _shown(self) -> tuple[Row, ...]:
        return self.rows if self.state == "wrong" and not self.note else ()

    @property
    def _notes(self) -> list[str]:
        """The notes of the shown rows, equal ones once."""
        first: dict[str, str] = {}
        said = []
        for row in self._shown:
            said.append(say("as-in", case=first[row.note]) if row.note in first else self._in_words(row.note))
            if row.note:
                first.setdefault(row.note, row.what)
        return said

    def _in_words(self, note: str) -> str:
        """A note in the language of the labs, as far as its phrases are known."""
        first = note == WORDS["first"].format(exercise=self.exercise)
        return say("first", exercise=self.exercise) if first else in_words(note)

    def __repr__(self) -> str:
        width = max([len(self.exercise) + 16, *(columns(row.what) + 2 for row in self._shown)])
        head = padded(f"{self.exercise}   {say(self.state)}", width)
        lines = [f"{SIGNS[self.state]} {head}  {self.points}/{self.of}"]
        for row, note in zip(self._shown, self._notes, strict=True):
            mark = SIGNS["passed" if row.points == row.of else "wrong"]
            lines.append(f"  {mark} {padded(row.what, width - 2)}  {row.points}/{row.of}  {note}".rstrip())
        lines += [f"  {self._in_words(self.note)}"] if self.note else []
        return "\n".join(lines + [f"  {label}: {text}" if label else f"  {text}" for label, text in self.said])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td {_CELL}>{SIGNS['passed' if row.points == row.of else 'wrong']} {html.escape(row.what)}</td>"
            f"<td {_CELL}>{row.points}/{row.of}</td><td {_CELL}>{_html(note)}</td></tr>"
            for row, note in zip(self._shown, self._notes, strict=True)
        )
        table = f'<table style="margin:4px 0 0 1em">{rows}</table>' if rows else ""
        note = f'<div style="margin-left:1em">{_html(self._in_words(self.note))}</div>' if self.note else ""
        said = "".join(
            f'<div style="margin-left:1em">{f"<i>{label}:</i> " if label else ""}{_html(text)}</div>'
            for label, text in self.said
        )
        return f"<div>{_head(self.state, self.exercise, self.points, self.of)}{table}{note}{said}</div>"


@dataclasses.dataclass(frozen=True)
class Progress:
    """All exercises of a lab, one line each, and the sum."""

    lab: str
    verdicts: Sequence[Verdict]

    @property
    def points(self) -> int:
        return sum(verdict.points for verdict in self.verdicts)

    @property
    def of(self) -> int:
        return sum(verdict.of for verdict in self.verdicts)

    def __repr__(self) -> str:
        width = max(len(verdict.exercise) for verdict in self.verdicts)
        lines = []
        for v in self.verdicts:
            word = padded(say(v.state), 13)
            lines.append(f"{SIGNS[v.state]} {v.exercise:<{width}}  {word}  {v.points:>3}/{v.of}")
        return "\n".join([*lines, f"  {padded(say('lab', lab=self.lab), width + 15)}  {self.points:>3}/{self.of}"])

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{_head(v.state, v.exercise, v.points, v.of)}</div>" for v in self.verdicts)
        lab = html.escape(say("lab", lab=self.lab))
        return f"<div>{lines}<div>{lab}: <b>{self.points}/{self.of}</b></div></div>"


@dataclasses.dataclass(frozen=True)
class Panel:
    """The output of a lab's first cell: how far the learner is, what comes next, and perhaps a note of a line or
    two."""

    lab: str
    points: int
    of: int
    next: str = ""
    note: str = ""

    def __repr__(self) -> str:
        after = f"; {say('next')} {self.next}" if self.next else ""
        return f"{self._lab}: {self._points}{after}" + (f"\n{self.note}" if self.note else "")

    @property
    def _lab(self) -> str:
        return say("lab", lab=self.lab)

    @property
    def _points(self) -> str:
        return say("points", points=self.points, of=self.of)

    def _repr_html_(self) -> str:
        share = 100 * self.points // max(self.of, 1)
        after = f"; {say('next')} <code>{html.escape(self.next)}</code>" if self.next else ""
        note = "".join(f"<div>{html.escape(line)}</div>" for line in self.note.splitlines())
        bar = (
            '<div style="width:20em;height:6px;margin-top:3px;background:#d0d0d0">'
            f'<div style="width:{share}%;height:6px;background:var({_COLOURS["passed"]})"></div></div>'
        )
        return f"<div>{html.escape(self._lab)}: <b>{self._points}</b>{after}{bar}{note}</div>"


def _html(text: str) -> str:
    """Text for a page; what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _head(state: str, exercise: str, points: int, of: int) -> str:
    said = f'<span style="color:var({_COLOURS[state]})">{SIGNS[state]} {say(state)}</span>'
    return f"{said} &nbsp;<code>{html.escape(exercise)}</code>&nbsp; <b>{points}/{of}</b>"
