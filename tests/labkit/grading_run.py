"""`minimegatron grade` on a folder, with all it wrote and all it left."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from minimegatron import cli
from minimegatron.launch import procs

COURSE = "tests.labkit.mini_course"


class Run(NamedTuple):
    status: int
    said: str
    complaints: str
    out: Path
    rows: dict[str, Any]
    left: list[str]


def run(folder: Path, *words: str, lab: str = COURSE) -> Run:
    """`minimegatron grade`, with all it writes in `folder/out`, and what it left on the disk and running."""
    out, scratch = folder / "out", folder / "scratch"
    out.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    files = ["--out", "marks.csv", "--json", "marks.json", "--report", "report.html"]
    files = [str(out / word) if "." in word else word for word in files] + ["--feedback", str(out / "feedback")]
    before = set(procs.children(os.getpid()))
    said, complaints, kept = io.StringIO(), io.StringIO(), tempfile.tempdir
    tempfile.tempdir = str(scratch)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaints):
            status = cli.main(["grade", str(folder / "in"), *(["--lab", lab] if lab else []), *files, *words])
    finally:
        tempfile.tempdir = kept
    left = [path.name for path in scratch.iterdir()]
    left += [f"process {pid}" for pid in set(procs.children(os.getpid())) - before]
    rows = json.loads((out / "marks.json").read_text()) if (out / "marks.json").exists() else {"marks": []}
    return Run(status, said.getvalue(), complaints.getvalue(), out, rows, left)
