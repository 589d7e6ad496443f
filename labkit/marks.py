"""Marks as files: CSV for the spreadsheet, JSON with every reason, one page of feedback for each learner.

| file              | holds                                                                                         |
|-------------------|-----------------------------------------------------------------------------------------------|
| `--out CSV`       | a row a learner (and lab): learner, lab, file, points per exercise, total, max, percent, remarks |
| `--json FILE`     | what `--regrade` needs, and per learner every case with its reason, hints; at the end seconds  |
| `--feedback DIR`  | `LEARNER.html`: the tables that `check` shows, with mistake, idea and hint                     |

The CSV is the same for the same marks, byte for byte, and so is the JSON down to its seconds. What comes from a
submission is cleaned (`shown`). A cell that a spreadsheet would take for a formula gets an
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

from labkit.grading import Mark
from labkit.regrade import FORMAT
from labkit.shown import clean, named
from minimegatron.errors import ConfigError

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
    """The table of marks; exercises of several labs side by side, each with the name of its lab."""
    pairs = ((mark.lab, verdict.exercise) for mark in marks for verdict in mark.verdicts)
    columns = sorted(dict.fromkeys(pairs), key=lambda column: column[0])
    several = len({lab for lab, _ in columns}) > 1
    stream = io.StringIO()
    table = csv.writer(stream, lineterminator="\n")
    names = [f"{lab}/{name}" if several else name for lab, name in columns]
    table.writerow(["learner", "lab", "file", *names, "total", "max", "percent", "remarks"])
    for mark in marks:
        points = {(mark.lab, verdict.exercise): str(verdict.points) for verdict in mark.verdicts}
        cells = [points.get(column, "") for column in columns]
        words = [_tame(mark.learner), _tame(mark.lab), _tame(mark.file)]
        last = [str(mark.points), str(mark.of), f"{mark.percent:.1f}", _tame("; ".join(mark.remarks))]
        table.writerow([*words, *cells, *last])
    return stream.getvalue()


def _tame(text: str) -> str:
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text


def as_rows(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """All that is known of each mark and can be repeated, as plain data."""
    return [
        {
            "learner": mark.learner,
            "lab": mark.lab,
            "file": mark.file,
            "submission": mark.submission.digest,
            "points": mark.points,
            "max": mark.of,
            "percent": mark.percent,
            "remarks": list(mark.remarks),
            "faults": dict(mark.faults),
            "exercises": [
                {
                    "exercise": verdict.exercise,
                    "state": verdict.state,
                    "points": verdict.points,
                    "max": verdict.of,
                    "note": verdict.note,
                    "mistake": verdict.mistake,
                    "idea": verdict.idea,
                    "cases": [
                        {"case": row.what, "points": row.points, "max": row.of, "note": row.note}
                        for row in verdict.rows
                    ],
                }
                for verdict in mark.verdicts
            ],
        }
        for mark in marks
    ]


def as_json(marks: Sequence[Mark], run: Mapping[str, Any]) -> str:
    """All that is known, for a program, to answer a complaint, and for `--regrade`. Seconds come last."""
    seconds = [
        {"learner": mark.learner, "lab": mark.lab, "exercises": {n: round(s, 2) for n, s in mark.seconds.items()}}
        for mark in marks
    ]
    return json.dumps({"format": FORMAT, **run, "marks": as_rows(marks), "seconds": seconds}, indent=1) + "\n"


def feedback(marks: Sequence[Mark], folder: Path) -> None:
    """Write one page for each learner: what `check` shows, and nothing of the others."""
    for learner in dict.fromkeys(mark.submission.learner for mark in marks):
        mine = [mark for mark in marks if mark.submission.learner == learner]
        name = html.escape(named(learner))
        body = f"<h1>{name}</h1>" + "".join(map(_feedback, mine))
        write(folder / f"{_short(learner)}.html", PAGE.format(title=name, body=body))


def _short(name: str) -> str:
    """A name that can be shown and leaves room for an ending: files' names have at most 255 bytes."""
    raw, shown = os.fsencode(name), clean(name)
    same = shown == name and len(raw) <= 200
    return name if same else f"{shown[:40]}-{hashlib.sha256(raw).hexdigest()[:12]}"


def _feedback(mark: Mark) -> str:
    remarks = "".join(f"<li>{html.escape(remark)}</li>" for remark in mark.remarks)
    verdicts = "".join(f"<section>{verdict._repr_html_()}</section>" for verdict in mark.verdicts)
    where = f'<p class="quiet">{html.escape(mark.file)}</p>' if mark.file else ""
    head = f"<h2>{html.escape(mark.lab or 'no lab')}: {mark.points} of {mark.of} points</h2>"
    return f"{head}{where}<ul>{remarks}</ul>{verdicts}"
