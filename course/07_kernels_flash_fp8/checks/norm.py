"""Checks of lab 07, third part: RMSNorm in CUDA C++ in three versions.

Beside its result (`launched`) a kernel is judged by its memory accesses: how often x was read, how many of the
fetched bytes were asked for, how wide a load was, how many barriers there were.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from course.lab07.compiling import prepare
from labkit.exercises import Answer, Case, Draw, Exercise

from .launched import OneLaunch, coalesced, counts_of, launch_of, reads


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma.double()


def _wrong_formulas(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> list[tuple[torch.Tensor, str]]:
    d, g = x.double(), gamma.double()
    squares = d.square()
    root = squares.mean(-1, keepdim=True).sqrt()
    missing = "eps is missing, or another number stands in its place: it is a parameter, added to the mean of squares"
    return [
        *((rms_norm(x, gamma, one), missing) for one in (0.0, 1e-6, 1e-5, 1e-3)),
        (rms_norm(x, torch.ones_like(gamma), eps), "this is y without gamma"),
        *((d * one * g, "eps belongs under the root, added to the mean of the squares") for one in (
            root.reciprocal(), root.reciprocal() + eps, (root + eps).reciprocal())),
        (d * (squares.sum(-1, keepdim=True) + eps).rsqrt() * g, "the *mean* of the squares: divide the sum by cols"),
        (d * (d.mean(-1, keepdim=True).square() + eps).rsqrt() * g, "the mean of squares, not the square of the mean"),
        (d * (squares.mean(-1, keepdim=True).sqrt() + eps) * g, "divide by the root (rsqrtf), do not multiply with it"),
        (rms_norm(x - x.mean(-1, keepdim=True), gamma, eps), "this is LayerNorm: RMSNorm subtracts no mean"),
        *((d * (times * squares.mean(-1, keepdim=True) + eps).rsqrt() * g,
           f"the sum of the squares is {times} times too large: parts are added more than once")
          for times in (2, 4, 8, 16, 32)),
    ]  # fmt: skip


def _a_row_a_thread(x: torch.Tensor, grid: int, block: int) -> str | None:
    rows = len(x)
    if (grid, block) == (-(-rows // 64), 64):
        return None
    wanted = f"{-(-rows // 64)} x 64 threads"
    return f"a thread a row, in blocks of 64: of {rows} rows grid x block is {wanted}, not {grid} x {block}"


def _a_row_a_block(x: torch.Tensor, grid: int, block: int) -> str | None:
    if (grid, block) == (len(x), 256):
        return None
    wanted = f"{len(x)} x 256 threads"
    return f"a block of 256 threads for each row: of {len(x)} rows grid x block is {wanted}, not {grid} x {block}"


def _a_row_a_warp(x: torch.Tensor, grid: int, block: int) -> str | None:
    """Check for at least one warp for each row."""
    if grid * block >= 32 * len(x):
        return None
    return f"{grid} x {block} threads are less than a warp for each of {len(x)} rows: most of the GPU stands idle"


ROWS, BLOCKS, WARPS = (
    OneLaunch("norm", ("x", "gamma"), rms_norm, _wrong_formulas, "eps", threads)
    for threads in (_a_row_a_thread, _a_row_a_block, _a_row_a_warp)
)


def _wide(answer: Answer) -> str | None:
    launch = launch_of(answer)
    for array in ("x", "gamma"):
        counts = counts_of(answer, array)
        width = sum(of["read"] for of in counts) / max(1, sum(of["loads"] for of in counts))
        if width < 15.9:
            return (
                f"a load of {array} brings {width:.3g} bytes; with float4 it brings 16 (cols is a multiple of 4 here)"
            )
    stored = [launch["counts"][name] for name in launch["writes"]]
    out = sum(of["written"] for of in stored) / max(1, sum(of["stores"] for of in stored))
    return f"a store to y takes {out:.3g} bytes; with float4 it takes 16" if out < 15.9 else None


def _few_barriers(answer: Answer) -> str | None:
    met = launch_of(answer)["counts"]["barriers"]
    return f"a thread meets __syncthreads {met:.3g} times; 2 are enough: a warp adds by shuffles" if met > 2 else None


def _tree(answer: Answer) -> str | None:
    """Check for a tree: no thread reads as many parts as one that adds all of them alone, and they are not added to one
    word one after the other."""
    launch = launch_of(answer)
    if launch["counts"]["atomics"] > launch["block"] // 2:
        return (f"{launch['counts']['atomics']:.0f} atomic additions a block change one word, one after another; in a "
                "tree half of the threads add at the same time")  # fmt: skip
    loads, threads = launch["counts"]["shared_loads"], launch["block"]
    if loads == 0:
        return "no thread reads from shared memory what another has added up: there the parts come together"
    most = max(2 * math.ceil(math.log2(threads)) + 8, threads // 2)
    if loads > most:
        return (f"a thread reads shared memory {loads} times, one part after another; in a tree of {threads} threads "
                f"it is {2 * math.ceil(math.log2(threads)) + 1} times")  # fmt: skip
    return None


def _sizes(rows: tuple[int, int], cols: tuple[int, int], step: int = 1, off: int = 0) -> Any:
    def inputs(draw: Draw) -> dict[str, Any]:
        r, c = draw.integer(*rows), draw.integer(*cols) * step + off
        x = draw.tensor(r, c) * draw.choice([0.03, 1.0, 5.0])
        return {"x": x, "gamma": 1 + draw.tensor(c) / 2, "eps": draw.choice([0.003, 0.02, 0.1])}

    return inputs


_wide_row = _sizes((1, 1), (1040, 1040), 4)  # more than 16 columns for each of 256 threads
_HAND = {
    "x": torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]]), "gamma": torch.tensor([1.0, 2.0, 1.0, -1.0]),
    "eps": 0.0,
}  # fmt: skip

# Eight columns: what is counted four times is not taken for a sum in the place of a mean.
_EIGHT = {
    "x": torch.tensor([[4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]]),
    "gamma": torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0, 2.0, 1.0, -1.0]), "eps": 0.0,
}  # fmt: skip

NORM_ROWS = Exercise(
    "norm_rows",
    function="norm",
    prepare=prepare,
    accept=[ROWS.right],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("one row, of one column or of thousands", _sizes((1, 1), (1, 1)), hidden=True, fixed=[_wide_row]),
        Case(
            "rows that do not fill the last block",
            _sizes((65, 90), (3, 40)),
            hidden=True,
            points=2,
            fixed=[_sizes((64, 64), (3, 3)), _sizes((129, 129), (2, 2))],
        ),
        Case("x is read twice at most", _sizes((3, 40), (3, 40)), hidden=True, accept=[reads(2)]),
    ],
    idea="Each thread has one row of its own, and goes along it twice: once to add up, once to write.",
    hint="row = blockIdx.x * blockDim.x + threadIdx.x; return if row >= rows. A loop over cols adds the squares; then "
    "rsqrtf(sum / cols + eps); a second loop writes y.",
)

NORM_BLOCK = Exercise(
    "norm_block",
    function="norm",
    prepare=prepare,
    accept=[BLOCKS.right],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("fewer columns than threads, and more", _sizes((2, 6), (40, 700)), hidden=True, points=2, fixed=[
            _sizes((2, 2), (9, 9)), _sizes((3, 3), (256, 256)), _sizes((2, 2), (300, 600)), _wide_row]),
        Case("the parts come together in a tree, not in one thread", _sizes((2, 4), (260, 600)), hidden=True, points=2,
             accept=[reads(2), _tree]),
        Case("neighbouring threads read neighbouring numbers", _sizes((3, 6), (520, 600)), hidden=True, accept=[
            coalesced]),
        Case("x is read twice at most", _sizes((3, 6), (100, 500)), hidden=True, accept=[reads(2)]),
    ],
    idea="Do what the picture of the tree shows: every thread brings one part, and all wait between two steps.",
    hint="Thread t takes columns t, t + blockDim.x, ... It puts its sum into parts[t]. Then, with a __syncthreads() "
    "before each step: for s = blockDim.x / 2, /4, ..., 1 the threads below s add parts[t + s] to parts[t]. One more "
    "__syncthreads() after the last step: then all threads may read parts[0].",
)  # fmt: skip

NORM_WARP = Exercise(
    "norm_warp",
    function="norm",
    prepare=prepare,
    accept=[WARPS.right, reads(2)],
    cases=[
        Case("2 rows of 8", _EIGHT),
        Case(
            "columns that are no multiple of 4",
            _sizes((2, 6), (10, 170), 4, 1),
            hidden=True,
            fixed=[
                _sizes((2, 2), (1, 1), 1, 2),
                _sizes((1, 1), (1030, 1030), 4, 1),
                _sizes((2, 2), (150, 150), 4, 3),
                _sizes((3, 3), (40, 40), 4, 2),
            ],
        ),
        Case(
            "columns that are",
            _sizes((2, 6), (10, 260), 4),
            hidden=True,
            fixed=[_wide_row, _sizes((70, 70), (2, 2), 4)],
        ),
        Case(
            "one column to more than 1024",
            _sizes((2, 3), (257, 300), 4),
            hidden=True,
            fixed=[_sizes((2, 2), (1, 1)), _sizes((1, 1), (1, 1), 4)],
        ),
        Case("two barriers at most", _sizes((2, 4), (65, 140), 4), hidden=True, accept=[_few_barriers]),
        Case("16 bytes a load and a store", _sizes((2, 4), (65, 140), 4), hidden=True, points=2, accept=[_wide]),
    ],
    idea="Three pieces: a sum inside of each warp, a sum of the warps' few sums, and four numbers with each load and "
    "each store.",
    hint="A warp: for o = 16, 8, 4, 2, 1: v += __shfl_xor_sync(0xffffffff, v, o). Lane 0 of each warp writes "
    "parts[warp]; one __syncthreads(); then every warp adds up parts in the same way, lanes beyond the warps with 0. "
    "A row starts at a multiple of 16 bytes only if cols % 4 == 0: else go number by number.",
)
EXERCISES = [NORM_ROWS, NORM_BLOCK, NORM_WARP]
