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


_LETS_GO_LATER = """

import threading
import time

_Overlapped = OverlappedReducer


class OverlappedReducer(_Overlapped):
    steps = 0

    def finish(self):
        super().finish()
        self.steps += 1
        tensors = [torch.zeros(1) for _ in range(8 * self.steps)]
        threading.Thread(target=lambda held: time.sleep(0.4), args=(tensors,)).start()
"""


def test_what_a_thread_lets_go_of_after_finish_is_not_held(nursery: Nursery) -> None:
    """On a busy machine gloo's thread comes late to its end, and more tensors were alive after each step by chance."""
    verdict = LAB.check(nursery, "overlap", LAB.solutions["overlap"] + _LETS_GO_LATER)
    assert verdict.points == verdict.of, verdict
