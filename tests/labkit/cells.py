"""The exercise cells of a lab's one source, solved or as the learner finds them."""

from __future__ import annotations

import re
from pathlib import Path

COURSE = Path(__file__).parents[2] / "course"
SOURCES = sorted(COURSE.glob("[0-9][0-9]_*/lab.py"))


def exercise_cells(lab: str, *, solved: bool) -> dict[str, str]:
    """{exercise: text of its cell}, solution bodies kept or replaced by the stub."""
    text = (COURSE / lab / "lab.py").read_text()
    cells = {}
    for name, body in re.findall(r"^# %%\n# %%exercise (\w+)\n(.*?)(?=^# %%)", text, flags=re.S | re.M):
        if solved:
            body = re.sub(r"^[ \t]*(?:// )?### (?:BEGIN|END) SOLUTION[ \t]*\n", "", body, flags=re.M)
        else:
            kernel = r'\1not_implemented("your code here");'
            body = re.sub(r"^([ \t]*)// ### BEGIN SOLUTION\n.*?// ### END SOLUTION", kernel, body, flags=re.S | re.M)
            stub = r'\1raise NotImplementedError("your code here")'
            body = re.sub(r"^([ \t]*)### BEGIN SOLUTION\n.*?### END SOLUTION", stub, body, flags=re.S | re.M)
        cells[name] = body
    return cells
