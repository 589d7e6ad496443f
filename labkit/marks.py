"""Marks as files: CSV for the spreadsheet, JSON with every reason, one page of feedback for each learner.

| file              | holds                                                                                         |
|-------------------|-----------------------------------------------------------------------------------------------|
| `--out CSV`       | a row a learner (and lab): learner, lab, file, points per exercise, total, max, percent, remarks |
| `--json FILE`     | seed, what the machine prevented, and per learner every case with its reason, hints, seconds   |
| `--feedback DIR`  | `LEARNER.html`: the tables that `check` shows                                                  |

The CSV is the same for the same marks, byte for byte. A cell that a spreadsheet would take for a formula gets an
apostrophe. Files are replaced in one step.
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import minimegatron
from labkit.grading import Mark
from minimegatron.errors import ConfigError

FORMAT = 1
PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>'
    "body{{font:15px/1.45 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#212121}}"
    "table{{border-collapse:collapse}}td,th{{text-align:left;vertical-align:top;padding:2px 12px 2px 0}}"
    "tr.line td{{border-top:1px solid #ddd}}td.n{{text-align:right}}h2{{margin-top:1.6em}}"
    "section{{margin:10px 0}}code{{font-size:95%}}.quiet{{color:#616161}}"
    "</style></head><body>{body}</body></html>\n"
)


def write(path: Path, text: str) -> None:
    """Replace a file in one step.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", newline="", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}", fix="name another file") from None


def as_csv(marks: Sequence[Mark]) -> str:
    """The table of marks; exercises of several labs side by side."""
    names = list(dict.fromkeys(verdict.exercise for mark in marks for verdict in mark.verdicts))
    stream = io.StringIO()
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(["learner", "lab", "file", *names, "total", "max", "percent", "remarks"])
    for mark in marks:
        points = {verdict.exercise: verdict.points for verdict in mark.verdicts}
        one = mark.submission
        cells = [points.get(name, "") for name in names]
        words = [_tame(one.learner), _tame(one.lab), _tame(one.file)]
        table.writerow([*words, *cells, mark.points, mark.of, mark.percent, _tame("; ".join(mark.remarks))])
    return stream.getvalue()


def _tame(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def as_json(marks: Sequence[Mark], run: Mapping[str, Any]) -> str:
    """All that is known, for a program, or to answer a complaint: `--seed` of it asks the same questions again."""
    rows = [
        {
            "learner": mark.submission.learner,
            "lab": mark.submission.lab,
            "file": mark.submission.file,
            "points": mark.points,
            "max": mark.of,
            "percent": mark.percent,
            "remarks": list(mark.remarks),
            "exercises": [
                {
                    "exercise": verdict.exercise,
                    "state": verdict.state,
                    "points": verdict.points,
                    "max": verdict.of,
                    "note": verdict.note,
                    "hint": verdict.hint,
                    "cases": [
                        {"case": row.what, "points": row.points, "max": row.of, "note": row.note}
                        for row in verdict.rows
                    ],
                    "seconds": round(mark.seconds.get(verdict.exercise, 0.0), 2),
                }
                for verdict in mark.verdicts
            ],
        }
        for mark in marks
    ]
    head = {"format": FORMAT, "minimegatron": minimegatron.__version__, **run}
    return json.dumps({**head, "marks": rows}, indent=1) + "\n"


def feedback(marks: Sequence[Mark], folder: Path) -> None:
    """Write one page for each learner: what `check` shows, and nothing of the others."""
    for learner in dict.fromkeys(mark.submission.learner for mark in marks):
        mine = [mark for mark in marks if mark.submission.learner == learner]
        body = f"<h1>{html.escape(learner)}</h1>" + "".join(_feedback(mark) for mark in mine)
        write(folder / f"{_short(learner)}.html", PAGE.format(title=html.escape(learner), body=body))


def _short(name: str) -> str:
    """A name that leaves room for an ending: files' names have at most 255 bytes."""
    raw = os.fsencode(name)
    return name if len(raw) <= 200 else f"{name[:40]}-{hashlib.sha256(raw).hexdigest()[:12]}"


def _feedback(mark: Mark) -> str:
    one = mark.submission
    remarks = "".join(f"<li>{html.escape(remark)}</li>" for remark in mark.remarks)
    verdicts = "".join(f"<section>{verdict._repr_html_()}</section>" for verdict in mark.verdicts)
    where = f'<p class="quiet">{html.escape(one.file)}</p>' if one.file else ""
    head = f"<h2>{html.escape(one.lab or 'no lab')}: {mark.points} of {mark.of} points</h2>"
    return f"{head}{where}<ul>{remarks}</ul>{verdicts}"
