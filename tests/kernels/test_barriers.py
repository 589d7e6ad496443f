"""Every barrier of every kernel file is there for a reason: without it, some order of warps gives another result."""

from __future__ import annotations

import faulthandler
import os
import re

import pytest
import torch

from minimegatron.kernels import build, chunk_scan, flash, fp8, operators, paged, pointwise
from tests.kernels.compare import random
from tests.kernels.test_paged import Places, case
from tests.thorough import mostly_thorough

pytestmark = pytest.mark.thorough

BARRIER = re.compile(r"^ *__sync(threads|warp)\(\);.*\n", re.MULTILINE)
# (file, which barrier) -> why leaving it out cannot be seen here.
UNSEEN = {
    ("softmax", 1): "lets block_max be called again; its callers call it once",
    (
        "flash_attention",
        2,
    ): "shuffles stand between writing and reading: lanes meet there, but memory is not ordered by it",
}


def run_softmax() -> list[torch.Tensor]:
    return [pointwise.scaled_softmax(random(1, 1, 2, 1024), 1.0)]


def run_fp8() -> list[torch.Tensor]:
    x, seen = random(64, 64), torch.zeros(())
    fp8.cast(x, torch.ones(()), fp8.E4M3, seen)
    q, qt, _ = fp8.cast(x, torch.ones(()), fp8.E4M3, transpose=True)  # alone: to find the maximum is a barrier too
    assert qt is not None
    tiles, scales = fp8.cast_tiles(random(128, 128, seed=1), (128, 128), fp8.E4M3)
    return [q.float(), qt.float(), tiles.float(), scales, seen, fp8.magnitudes(x)]


def run_flash() -> list[torch.Tensor]:
    q, k, v = (random(1, 1, 96, 16, seed=i).requires_grad_() for i in range(3))
    out, lse = flash.flash_attention(q, k, v, 0.25)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), random(1, 1, 96, 16, seed=4))]


def run_chunk_scan() -> list[torch.Tensor]:
    given = [random(1, 1, 96, 96), -random(1, 2, 96, seed=1).abs().cumsum(-1), random(1, 96, 2, 40, seed=2)]
    tensors = [t.requires_grad_() for t in given]
    y = chunk_scan.chunk_scan(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, random(1, 96, 2, 40, seed=3))]


def run_paged() -> list[torch.Tensor]:
    """A sequence of several ranges of keys, and one whose later ranges are empty."""
    places = Places((1, 1), (700, 20), 16)
    q, keys, values = case(places, 1, 2, 16, 16, torch.float32, rest=0.0)
    return [paged.by_a_kernel(q, keys, values, places, paged.Scores(0.25, None, None, None))]


RUNS = {"softmax": run_softmax, "fp8": run_fp8, "flash_attention": run_flash, "chunk_scan": run_chunk_scan}
RUNS["paged_attention"] = run_paged


def source(name: str) -> str:
    """In fp32 alone, which compiles quickly."""
    return "#define MM_ONLY_DTYPE 0\n" + (build.CSRC / f"{name}.cu").read_text()


def test_the_files_with_barriers_are_these():
    have = {name for name in build.sources() if BARRIER.search((build.CSRC / f"{name}.cu").read_text())}
    assert have == RUNS.keys()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gives(name: str, want: list[torch.Tensor]) -> bool:
    """Whether a kernel gives this, in a process of its own: one without a barrier may read anywhere."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # to crash is one way to give another result
        try:
            os._exit(0 if same(RUNS[name](), want) else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", mostly_thorough(RUNS, lambda name: name == "fp8"))
def test_a_barrier_left_out_is_seen(name, monkeypatch):
    whole, want = source(name), RUNS[name]()
    barriers = list(BARRIER.finditer(whole))
    for i, barrier in enumerate(barriers):
        broken = whole[: barrier.start()] + whole[barrier.end() :]
        library = operators.load(name, "emulated", broken)
        monkeypatch.setattr(operators, "library", lambda *_, library=library: library)
        found = []
        for order in (0, 1, 2):
            library.order(order)
            found.append(gives(name, want))
        line = whole[: barrier.start()].count("\n")
        assert all(found) == ((name, i) in UNSEEN), f"{name}.cu:{line}: without its barrier: {found}"
