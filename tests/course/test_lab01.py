"""Lab 01's checks: the sizes that a ring is always tried with. What its cell shows of sums out of order."""

from __future__ import annotations

from pathlib import Path

from labkit import warm
from labkit.fresh import Nursery
from labkit.ranks.pool import shared_pool
from tests.course.marked import LABS
from tests.labkit.cells import COURSE

LAB = LABS["01_process_groups"]


def test_a_size_that_needs_an_empty_part_is_always_tried(nursery: Nursery) -> None:
    by_chunk = LAB.solutions["ring_all_reduce"].replace("tensor_split", "chunk")
    verdict = LAB.check(nursery, "ring_all_reduce", by_chunk)
    assert [row.points == row.of for row in verdict.rows] == [True, True, True, False, True], verdict


def test_sums_out_of_order_are_of_two_parameters(tmp_path: Path) -> None:
    """The cell's output is hidden; its text and the exercise's first case go by 1 + 20 in the place of 1 + 10."""
    text = (COURSE / "01_process_groups" / "lab.py").read_text()
    start = text.index("# %%ranks 2 --out mixed\n")
    (tmp_path / "mixed.py").write_text(text[start : text.index("\n# %%", start + 1)])
    reported = shared_pool(2).run(warm.run_cell, str(tmp_path / "mixed.py"), timeout=60)
    assert list(reported) == [21.0, 12.0]
