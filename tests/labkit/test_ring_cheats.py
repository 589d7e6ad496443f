"""No way of talking is uncounted: an all-reduce that pretends to be a ring scores nothing."""

from __future__ import annotations

import pytest

from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.verdict import Verdict
from tests.labkit.ring_cheats import CHEATS, RING

pytestmark = pytest.mark.thorough

COURSE = "tests.labkit.ring_course"


def check(nursery: Nursery, exercise: str, source: str) -> Verdict:
    return judge(nursery, COURSE, exercise, {exercise: source}, 1)


def test_a_ring_passes(nursery: Nursery) -> None:
    assert check(nursery, "ring", RING).state == "passed"


@pytest.mark.parametrize("name", CHEATS)
def test_a_hidden_all_reduce_scores_nothing(nursery: Nursery, name: str) -> None:
    verdict = check(nursery, "ring", CHEATS[name])
    assert (verdict.state, verdict.points) == ("wrong", 0), verdict


OVERLAPPED = """
import torch, torch.distributed as dist
def overlapped(x, w):
    total = x.contiguous().clone()
    work = dist.all_reduce(total, async_op=True)
    product = w @ w
    work.wait()
    return {"total": total, "product": product}
"""


def test_what_should_be_computed_meanwhile_is_spoiled_afterwards(nursery: Nursery) -> None:
    assert check(nursery, "overlapped", OVERLAPPED).state == "passed"
    late = OVERLAPPED.replace("    product = w @ w\n    work.wait()", "    work.wait()\n    product = w @ w")
    verdict = check(nursery, "overlapped", late)
    assert verdict.points == 0 and "product" in str(verdict) and "nan" in str(verdict)


REDUCER = """
import torch, torch.distributed as dist
class Reducer:
    def __init__(self, x):
        self.x = x.contiguous().clone()
        self.work = dist.all_reduce(self.x, async_op=True)
    def finish(self):
        self.work.wait()
        return self.x
"""


def test_a_moment_that_is_marked_has_a_place_in_the_order(nursery: Nursery) -> None:
    assert check(nursery, "reducer", REDUCER).state == "passed"
    early = REDUCER.replace("    def finish", "        self.work.wait()\n    def finish")
    assert "waits for all_reduce before backward ended" in str(check(nursery, "reducer", early))
    late = REDUCER.replace("        self.work = dist.all_reduce(self.x, async_op=True)\n", "").replace(
        "        self.work.wait()", "        dist.all_reduce(self.x)"
    )
    assert "had started 0 of 1 all_reduce when backward ended" in str(check(nursery, "reducer", late))
    twice = REDUCER.replace("        return", '        mark("backward ended")\n        return').replace(
        "import torch,", "from labkit.transport_group import mark\nimport torch,"
    )
    assert "is not marked once" in str(check(nursery, "reducer", twice))


def test_what_needs_a_late_number_comes_after_it(nursery: Nursery) -> None:
    assert check(nursery, "gated", REDUCER).state == "passed"
    lazy = REDUCER.replace("        self.work = dist.all_reduce(self.x, async_op=True)\n", "").replace(
        "        self.work.wait()", "        dist.all_reduce(self.x)"
    )
    assert "had started 0 of 1 all_reduce when late 0" in str(check(nursery, "gated", lazy))
    patched = "from labkit import transport_group\nreal, transport_group.late = transport_group.late, lambda i: 1.0\n"
    lying = patched + lazy.replace(
        "        dist.all_reduce", "        dist.all_reduce(self.x); real(0); dist.all_reduce"
    )
    assert check(nursery, "gated", lying).points == 0
