"""The judge's process beside a learner's: what it launches and moves, what it refuses, and that nothing forges it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from labkit.broker import serve
from labkit.kernel_service import ORDERS, KernelService

from labkit import channel
from labkit.cuda import build_library
from labkit.cuda_text import digest, parsed
from labkit.fresh import Nursery
from labkit.hbm import JudgedMemory, MemoryService
from labkit.judge import judge
from minimegatron.errors import ConfigError
from minimegatron.kernels.operators import KernelError
from tests.labkit.cells import exercise_cells

LAB = "07_kernels_flash_fp8"
SCALE = r"""
__global__ void scale(const float* x, float* y, int n, float by, int how) {
  int i = threadIdx.x;
  if (how == 1) y[n] = 0;
  if (how == 2) y[i] += x[i];
  else if (i < n) y[i] = by * x[i];
}
"""


@pytest.fixture
def kernels(tmp_path: Path) -> KernelService:
    name, parameters, _ = parsed(SCALE, 1)
    raw = torch.frombuffer(bytearray(build_library(SCALE, 1, "emulated").read_bytes()), dtype=torch.uint8)
    library = {"library": raw, "name": name, "parameters": [list(one) for one in parameters]}
    return KernelService({digest(SCALE): library}, tmp_path)


def launch(kernels: KernelService, *tensors: torch.Tensor, numbers: Any = (8, 2.0, 0), **other: Any) -> Any:
    head = {"id": 1, "do": "launch", "text": digest(SCALE), "numbers": list(numbers), "grid": 1, "block": 8, **other}
    [(_, answer, results)] = kernels.handle(0, head, list(tensors))
    return answer, results


def test_a_launch_answers_with_what_was_written_and_keeps_what_it_was_given(kernels: KernelService) -> None:
    x, y = torch.arange(8.0), torch.full((8,), 5.0)
    kernels.handle(0, {"id": 0, "do": "trial"}, [])
    answer, [result] = launch(kernels, x, y)
    assert torch.allclose(result, 2 * x) and answer["counts"]["x"]["loads"] == 8
    [[record]] = kernels.evidence()
    assert torch.equal(record["marked"]["y"], result)
    assert record["name"] == "scale" and record["numbers"] == {"n": 8, "by": 2.0, "how": 0}
    assert torch.equal(record["arrays"]["x"], x) and torch.equal(record["arrays"]["y"], y)
    assert [torch.equal(outputs["y"], 2 * x) for outputs in record["outputs"]] == [True] * len(ORDERS)
    assert record["writes"]["y"].tolist() == [1] * 8 and record["error"] == ""


def test_what_goes_back_is_marked_and_known_by_it(kernels: KernelService) -> None:
    """Torch's own result, equal to what the kernel wrote, is not what went back."""
    x, seen = torch.arange(1.0, 9.0), []
    for _ in range(8):
        kernels.handle(0, {"id": 0, "do": "trial"}, [])
        _, [result] = launch(kernels, x, torch.empty(8))
        away = (result.view(torch.int32) - (2 * x).view(torch.int32)).abs()
        assert 1 <= int(away.sum()) and int(away.max()) == 1
        seen.append(away)
    assert len({tuple(one.tolist()) for one in seen}) > 1


def test_what_was_in_an_array_before_is_no_answer(kernels: KernelService) -> None:
    kernels.handle(0, {"id": 0, "do": "trial"}, [])
    _, [result] = launch(kernels, torch.ones(8), torch.ones(8), numbers=(4, 2.0, 0))
    assert result.isnan().tolist() == [False] * 4 + [True] * 4
    _, [result] = launch(kernels, torch.ones(8), torch.ones(8), numbers=(8, 2.0, 2))
    assert result.isnan().all()
    assert "reads y[0] before the kernel has written it" in kernels.evidence()[0][1]["note"]


def test_a_failed_launch_is_told_and_kept_in_its_trial(kernels: KernelService) -> None:
    for _ in range(2):
        kernels.handle(0, {"id": 0, "do": "trial"}, [])
    answer, results = launch(kernels, torch.ones(8), torch.ones(8), numbers=(8, 2.0, 1))
    assert "writes y[8]; it has 8 numbers" in answer["failed"] and answer["line"] == 4 and not results
    first, [record] = kernels.evidence()
    assert first == [] and record["error"] == answer["failed"]


@pytest.mark.parametrize(
    ("tensors", "other"),
    [
        (1, {}), (3, {}), (2, {"numbers": (8, 2.0)}), (2, {"numbers": (8, "2", 0)}), (2, {"numbers": (8, None, 0)}),
        (2, {"numbers": (1 << 40, 2.0, 0)}), (2, {"grid": 0}), (2, {"block": 4096}), (2, {"grid": "1"}),
        (2, {"grid": [1]}), (2, {"text": "0" * 32}), (2, {"text": "../../lib"}),
    ],
)  # fmt: skip
def test_what_is_no_launch_is_refused(kernels: KernelService, tensors: int, other: dict[str, Any]) -> None:
    kernels.handle(0, {"id": 0, "do": "trial"}, [])
    with pytest.raises(KernelError):
        launch(kernels, *[torch.ones(8)] * tensors, **other)
    with pytest.raises(KernelError):
        launch(kernels, torch.ones(8).double(), torch.ones(8))
    assert kernels.evidence() == [[]]


def test_nothing_is_launched_before_a_trial_begins(kernels: KernelService) -> None:
    with pytest.raises(KernelError):
        launch(kernels, torch.ones(8), torch.ones(8))


# ------------------------------------------------------------------------------------------------------------- memory


@contextmanager
def memory(trials: list[dict[str, torch.Tensor]]) -> Iterator[Any]:
    near, far = socket.socketpair()
    control, hears = socket.socketpair()
    near.settimeout(20)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(serve, [far], hears, {"memory": MemoryService(trials)})
        channel.attach(near)
        try:
            yield lambda: (control.send(b"."), done.result(20)["memory"])[1]
        finally:
            channel.attach(None)
            control.close()


def test_a_memory_of_the_judges_counts_what_is_moved_and_keeps_the_tensors() -> None:
    k, out = torch.randn(6, 2), torch.zeros(6, 2)
    with memory([{"k": k.clone()}, {"k": k.clone(), "out": out}]) as end:
        for _ in range(2):
            channel.mine().ask({"to": "memory", "do": "trial"})
        mine = JudgedMemory()
        assert mine.shapes == {"k": [6, 2], "out": [6, 2]}
        tile = mine.load("k", 2, 5)
        assert torch.equal(tile, k[2:5])
        tile.zero_()
        mine.store("out", 0, 2, torch.ones(2, 2))
        wrong = (lambda: mine.load("k", 4, 7), lambda: mine.load("v", 0, 1), lambda: mine.load("k", 3, 3),
                 lambda: mine.store("out", 0, 2, torch.ones(2)))  # fmt: skip
        for ask in wrong:
            with pytest.raises(ConfigError):
                ask()
        assert (mine.loaded, mine.stored, mine.moved) == ({"k": 6, "out": 0}, {"k": 0, "out": 4}, 10)
        first, second = end()
    assert first["order"] == [] and first["loaded"] == {"k": 0}
    assert second["order"] == [["load", "k", 2, 5], ["store", "out", 0, 2]]
    assert (second["loaded"], second["stored"]) == ({"k": 6, "out": 0}, {"k": 0, "out": 4})
    assert torch.equal(second["tensors"]["k"], k) and second["tensors"]["out"].sum() == 4


# ----------------------------------------------------------------------------------------------------------- in a check

FORGED = """
import torch
from labkit.evidence import Evidence

FAKE = {"name": "k", "arrays": {}, "numbers": {}, "outputs": [], "writes": {}, "counts": {}, "note": "", "error": ""}
honest = Evidence.to_plain
Evidence.to_plain = lambda self: {**honest(self), "launches": [FAKE]}


def norm(x, gamma, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[1],), gamma, eps)
"""


def test_launches_that_the_learners_process_reports_do_not_count(nursery: Nursery) -> None:
    verdict = judge(nursery, f"course.{LAB}", "norm_rows", {"norm_rows": FORGED})
    assert verdict.points == 0 and "no kernel ran" in repr(verdict)


def test_a_kernel_that_ends_its_process_takes_no_verdict_along(nursery: Nursery) -> None:
    solved = exercise_cells(LAB, solved=True)["norm_rows"]
    divides = solved.replace("if (row >= rows) return;", "if (row >= rows) return; y[0] = row / (rows - rows);")
    assert divides != solved
    verdict = judge(nursery, f"course.{LAB}", "norm_rows", {"norm_rows": divides})
    assert verdict.points == 0 and "an integer was divided by 0" in repr(verdict), verdict


def test_each_launch_is_tried_on_arrays_that_nobody_knows(kernels: KernelService) -> None:
    x, y = torch.arange(8.0), torch.zeros(8)
    kernels.handle(0, {"id": 0, "do": "trial"}, [])
    launch(kernels, x, y)
    launch(kernels, x, y)
    [records] = kernels.evidence()
    drawn = [record["other"]["arrays"]["x"] for record in records]
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], x)
    for record, other in zip(records, drawn, strict=True):
        assert torch.equal(record["other"]["outputs"]["y"], 2 * other) and record["counts"] == record["other"]["counts"]
