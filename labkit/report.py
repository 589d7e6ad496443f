"""One page for the instructor: how far each learner is, which exercises fail and why, which took long, which are equal.

Self-contained HTML from the marks of one run; every text of a learner is escaped.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.grading import Mark
from labkit.marks import PAGE
from labkit.shown import clean
from labkit.verdict import SIGNS, Verdict

_SAME = 160  # characters of code; two short right answers are the same by themselves
_SLOWEST = 5


def as_html(marks: Sequence[Mark], run: Mapping[str, Any]) -> str:
    """The page.

    Args:
        marks: of one run.
        run: `seed`, `complete`, and `prevented`: {what a submission might do: whether this machine prevents it}.
    """
    labs = list(dict.fromkeys(mark.submission.lab for mark in marks))
    body = ["<h1>Marks</h1>", _about(marks, run), "<h2>Who is where</h2>", _learners(marks)]
    for lab in labs:
        mine = [mark for mark in marks if mark.submission.lab == lab and mark.verdicts]
        if mine:
            body += [f"<h2>Exercises of {_e(lab)}</h2>", _exercises(mine)]
    body += ["<h2>What took long</h2>", _slowest(marks), "<h2>The same text</h2>", _same(marks)]
    return PAGE.format(title="Marks", body="".join(body))


def _e(text: object) -> str:
    return html.escape(str(text))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML already."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    lines = "".join(f'<tr class="line">{"".join(f"<td>{cell}</td>" for cell in row)}</tr>' for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _about(marks: Sequence[Mark], run: Mapping[str, Any]) -> str:
    lines = [f"{len(marks)} submissions. Seed of the hidden cases: <code>{_e(run['seed'])}</code>; "
             "<code>--seed</code> asks the same again."]  # fmt: skip
    if faults := [f"{mark.learner}: {what}" for mark in marks for what in mark.faults.values()]:
        said = "; ".join(faults[:_SLOWEST])
        lines.append(f"<b>{len(faults)} faults of the course, this machine or this program</b>, first {_e(said)}")
    if not run["complete"]:
        lines.append("<b>The run was interrupted: some submissions are missing.</b>")
    prevented = run["prevented"]
    held = [what for what, yes in prevented.items() if yes]
    open_ = [what for what, yes in prevented.items() if not yes]
    if held:
        lines.append(f"On this machine a submission cannot {_e(', '.join(held))} (tried at the start of the run).")
    if open_:
        lines.append(f"<b>This kernel does not prevent it to {_e(', '.join(open_))}: grade in a container.</b>")
    return "".join(f"<p>{line}</p>" for line in lines)


def _learners(marks: Sequence[Mark]) -> str:
    def row(mark: Mark) -> list[str]:
        bar = (
            '<div style="width:8em;height:8px;background:#d0d0d0">'
            f'<div style="width:{min(mark.percent, 100):g}%;height:8px;background:#2e7d32"></div></div>'
        )
        signs = "".join(SIGNS[verdict.state] for verdict in mark.verdicts)
        points = f"{mark.points}/{mark.of}"
        return [_e(mark.learner), _e(mark.lab), points, bar, signs, _e("; ".join(mark.remarks))]

    ordered = sorted(marks, key=lambda mark: (mark.submission.lab, -mark.percent, mark.submission.learner))
    return _table(["learner", "lab", "points", "", "exercises", "remarks"], map(row, ordered))


def _exercises(marks: Sequence[Mark]) -> str:
    by_name: dict[str, list[Verdict]] = defaultdict(list)
    for mark in marks:
        for verdict in mark.verdicts:
            by_name[verdict.exercise].append(verdict)

    def row(name: str, verdicts: list[Verdict]) -> list[str]:
        states = Counter(verdict.state for verdict in verdicts)
        mean = sum(verdict.points for verdict in verdicts) / len(verdicts)
        cells = [f"<code>{_e(name)}</code>", *(str(states[state]) for state in ("passed", "wrong", "todo"))]
        return [*cells, f"{mean:.1f} of {verdicts[0].of}", _reasons(verdicts)]

    head = ["exercise", "passed", "not right", "not done", "mean points", "mistakes and reasons, how often"]
    return _table(head, (row(name, verdicts) for name, verdicts in by_name.items()))


def _reasons(verdicts: Iterable[Verdict]) -> str:
    wrong = [verdict for verdict in verdicts if verdict.state == "wrong"]
    said = Counter(one.mistake or one.note or one.idea or _first(one) for one in wrong)
    return "<br>".join(f"{times} × {_e(reason)}" for reason, times in said.most_common(4))


def _first(verdict: Verdict) -> str:
    return next((row.note for row in verdict.rows if row.note), "")


def _slowest(marks: Sequence[Mark]) -> str:
    times = [(mark.seconds[name], f"{mark.learner} {mark.lab}", name) for mark in marks for name in mark.seconds]
    rows = [[_e(who), f"<code>{_e(name)}</code>", f"{seconds:.1f} s"] for seconds, who, name in sorted(times)[::-1]]
    return _table(["learner", "exercise", "to judge it"], rows[:_SLOWEST])


def _same(marks: Sequence[Mark]) -> str:
    groups = same_text(marks)
    if not groups:
        return f"<p>No two learners share the text of an exercise (of {_SAME} characters or more).</p>"
    rows = [[f"<code>{_e(name)}</code>", _e(", ".join(map(clean, who)))] for name, who in groups]
    note = "<p>Comments, docstrings and white space aside. A sign to talk, no proof.</p>"
    return note + _table(["exercise", "learners"], rows)


def same_text(marks: Sequence[Mark]) -> list[tuple[str, list[str]]]:
    """(exercise, learners) for each code of some length that several submitted; stubs do not count."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for mark in marks:
        done = {verdict.exercise for verdict in mark.verdicts if verdict.state != "todo"}
        for name in sorted(done & set(mark.submission.sources)):
            code = re.sub(r'(?s)"""(?:(?!""").)*"""|#[^\n]*|\s+', "", mark.submission.sources[name])
            if len(code) >= _SAME:
                digest = hashlib.sha256(code.encode()).hexdigest()
                found[mark.submission.lab, name, digest].append(mark.submission.learner)
    return [(name, who) for (_, name, _), who in found.items() if len(set(who)) > 1]
