"""Take the README's pictures out of lab 01 as it was executed: what they show is what a learner sees.

python docs/pictures.py
"""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat

DOCS = Path(__file__).resolve().parent
NOTEBOOK = DOCS.parent / "solutions/01_process_groups.ipynb"
# file -> (words of the cell that drew it, which of its pictures)
PICTURES = {"rank_grid.png": ("rank_grid(sizes", 0), "overlap.png": ("gantt(", -1)}


def main() -> None:
    """Write every picture into docs/images."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    for name, (words, which) in PICTURES.items():
        [cell] = [c for c in cells if c.cell_type == "code" and words in c.source]
        drawn = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
        (DOCS / "images" / name).write_bytes(base64.b64decode(drawn[which]))
        print(f"docs/images/{name}")


if __name__ == "__main__":
    main()
