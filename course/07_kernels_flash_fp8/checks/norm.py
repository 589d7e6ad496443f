"""Checks of lab 07, third part: RMSNorm in CUDA C++, forward, in four versions.

Beside its result (`launched`) a kernel is judged by its memory accesses: how often x was read, how many of the
fetched bytes were asked for, how wide a load was, how many barriers there were.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from course.lab07.compiling import prepare
from labkit.exercises import Answer, Case, Draw, Exercise

from .launched import OneLaunch, close, coalesced, counts_of, launch_of, reads, same_bf16


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


def _a_block_a_row(x: torch.Tensor, grid: int, block: int) -> str | None:
    """Check for one block for each row, of any size."""
    return None if grid == len(x) else f"a block for each row: of {len(x)} rows grid is {len(x)}, not {grid}"


def _in_bf16(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> list[tuple[torch.Tensor, str]]:
    d, g = x.double(), gamma.double()
    rstd = (d.square().mean(-1, keepdim=True) + eps).rsqrt()
    early = "is rounded to bf16 on the way: compute in float32, and round once, at the end"
    return [
        ((d * rstd).bfloat16().double() * g, f"x times 1/root {early}"),
        (d * rstd.bfloat16().double() * g, f"1/root {early}"),
        (d * (rstd * g).bfloat16().double(), f"1/root times gamma {early}"),
        (d * (8 * d.square().mean(-1, keepdim=True) + eps).rsqrt() * g,
         "the mean of the squares is 8 times too large: a row has cols numbers, not cols / 8"),
        *_wrong_formulas(x, gamma, eps),
    ]  # fmt: skip


def _a_row_is_off(y: torch.Tensor, want: torch.Tensor) -> str | None:
    """Say so where every row has one factor, not the same for all: its sum is not what it should be."""
    sized = want.abs() > 1e-3 * want.abs().amax(1, keepdim=True)
    ratios = [(mine / right)[use] for mine, right, use in zip(y.double(), want, sized, strict=True)]
    if all(one.numel() and (one / one.median() - 1).abs().max() < 0.02 for one in ratios):
        return "each row is off by a factor of its own: its sum of squares, or 1/root, is not right to float32's digits"
    return None


BLOCKS, WARPS, REGISTERS = (
    OneLaunch("norm", ("x", "gamma"), rms_norm, _wrong_formulas, "eps", threads)
    for threads in (_a_row_a_block, _a_row_a_warp, _a_block_a_row)
)
BF16 = OneLaunch("norm", ("x", "gamma"), rms_norm, _in_bf16, "eps", _a_block_a_row, same_bf16, _a_row_is_off)


def _drive_wide(exercise: Any, x: Any, gamma: Any, eps: float) -> Any:
    """The learner's norm, or the words with which it refuses."""
    try:
        return exercise.norm(x, gamma, eps)
    except ValueError as error:
        return f"refused: {error}"


def _kept(answer: Answer) -> str | None:
    """Check for a right result; a row that is wider than the registers may be refused in its place."""
    cols = answer.inputs["x"].shape[1]
    refused = isinstance(answer.value, str)
    if refused and cols > WIDEST:
        launched = answer.evidence[0].notes.get("launch")
        return f"{cols} columns are refused after a launch: refuse them before" if launched else None
    if refused:
        return f"{cols} columns are {answer.value}; up to {WIDEST} there is room for the row"
    if cols > WIDEST and not answer.evidence[0].notes.get("launch") and _by_torch(answer):
        return None
    wrong = REGISTERS.right(answer)
    if wrong and cols > WIDEST and "y[" in wrong:
        return f"{cols} columns are more than {WIDEST}, and are neither refused nor right: {wrong}"
    return wrong


def _by_torch(answer: Answer) -> bool:
    """Whether a wide row's norm is right without a kernel, which is another way, too."""
    y, want = answer.value, rms_norm(**answer.inputs)
    return isinstance(y, torch.Tensor) and (y.dtype, y.shape) == (torch.float32, want.shape) and close(y, want)


def _once(answer: Answer) -> str | None:
    """Check that x is read once, and that what is kept of it can be in registers."""
    if isinstance(answer.value, str):
        return None
    array, index = launch_of(answer)["at_run_time"]
    if array:
        return (f"{array}[{index}]: this index is known only when the kernel runs, so on a GPU {array} lies in local "
                "memory, which is global memory; index it in a loop whose bounds are constants")  # fmt: skip
    return reads(1)(answer)


def _neighbours(answer: Answer) -> str | None:
    return None if isinstance(answer.value, str) else coalesced(answer)


def _wide(answer: Answer) -> str | None:
    launch, what = launch_of(answer), "eight bf16 in one load are 16"
    for array in ("x", "gamma"):
        counts = counts_of(answer, array)
        if not sum(of["loads"] for of in counts):
            return (f"no load of {array} is seen: what goes from memory into a function by value, as in f(row[i]), is "
                    "not counted here; load it into a variable first")  # fmt: skip
        width = sum(of["read"] for of in counts) / sum(of["loads"] for of in counts)
        if width < 15.9:
            return f"a load of {array} brings {width:.3g} bytes; {what}"
    stored = [launch["counts"][name] for name in launch["writes"]]
    out = sum(of["written"] for of in stored) / max(1, sum(of["stores"] for of in stored))
    return f"a store to y takes {out:.3g} bytes; eight bf16 in one store are 16" if out < 15.9 else None


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


def _sizes(rows: tuple[int, int], cols: tuple[int, int], step: int = 1, off: int = 0,
           dtype: torch.dtype = torch.float32) -> Any:  # fmt: skip
    def inputs(draw: Draw) -> dict[str, Any]:
        r, c = draw.integer(*rows), draw.integer(*cols) * step + off
        x = draw.tensor(r, c) * draw.choice([0.03, 1.0, 5.0])
        return {"x": x.to(dtype), "gamma": (1 + draw.tensor(c) / 2).to(dtype), "eps": draw.choice([0.003, 0.02, 0.1])}

    return inputs


_wide_row = _sizes((1, 1), (1040, 1040), 4)  # more than 16 columns for each of 256 threads
_HAND = {
    "x": torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]]), "gamma": torch.tensor([1.0, 2.0, 1.0, -1.0]),
    "eps": 0.0,
}  # fmt: skip

# Eight columns: what is counted four times is not taken for a sum in the place of a mean.
_EIGHT: dict[str, Any] = {
    "x": torch.tensor([[4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]]),
    "gamma": torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0, 2.0, 1.0, -1.0]), "eps": 0.0,
}  # fmt: skip

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
        Case("other sizes", _sizes((2, 6), (40, 700)), hidden=True, points=2, fixed=[
            _sizes((2, 2), (3, 3)), _sizes((3, 3), (256, 256)), _sizes((1, 1), (1030, 1030)), _wide_row]),
        Case("two barriers at most", _sizes((2, 4), (260, 560)), hidden=True, points=2, accept=[_few_barriers]),
        Case("neighbouring threads read neighbouring numbers", _sizes((3, 6), (520, 600)), hidden=True, accept=[
            coalesced]),
    ],
    idea="Two sums, one after the other: inside of each warp, then of the warps' few sums.",
    hint="A warp: for o = 16, 8, 4, 2, 1: v += __shfl_xor_sync(0xffffffff, v, o). Lane 0 of each warp writes "
    "parts[warp]; one __syncthreads(); then every warp adds up parts in the same way, lanes beyond the warps with 0.",
)  # fmt: skip

WIDEST = 4096
NORM_REGISTERS = Exercise(
    "norm_registers",
    function="norm",
    drive=_drive_wide,
    prepare=prepare,
    accept=[_kept],
    cases=[
        Case("2 rows of 8", _EIGHT),
        Case("up to 4096 columns: x is read once", _sizes((2, 4), (40, 900)), hidden=True, points=2, accept=[_once],
             fixed=[_sizes((2, 2), (3, 3)), _sizes((3, 3), (256, 256)), _sizes((2, 2), (257, 257)),
                    _sizes((1, 1), (4096, 4096))]),
        Case("wider than 4096: right, or refused with a ValueError", _sizes((1, 2), (4097, 4700)), hidden=True,
             points=2, fixed=[_sizes((1, 1), (4097, 4097)), _sizes((2, 2), (8200, 8200))]),
        Case("neighbouring threads read neighbouring numbers", _sizes((3, 6), (520, 600)), hidden=True, accept=[
            _neighbours]),
    ],
    idea="What a thread adds up it needs again a moment later: how many numbers is that, for 4096 columns?",
    hint="float kept[PER]; for k = 0 to PER - 1, unrolled: i = threadIdx.x + k * blockDim.x; kept[k] = i < cols ? "
    "row[i] : 0; sum += kept[k] * kept[k]. Then rstd from block_sum(sum), and a second such loop writes "
    "kept[k] * rstd * gamma[i] where i < cols. In norm: if cols > 4096: raise ValueError(...).",
)  # fmt: skip

_BF_HAND = {"x": _EIGHT["x"].bfloat16(), "gamma": _EIGHT["gamma"].bfloat16(), "eps": 0.0}


def _bf16(rows: tuple[int, int], packs: tuple[int, int]) -> Any:
    return _sizes(rows, packs, 8, dtype=torch.bfloat16)


def _long_sums(draw: Draw) -> dict[str, Any]:
    """Draw rows of equal squares: a sum in bf16 stops growing at 256 of them, and each square rounds the same way."""
    x = torch.sign(draw.tensor(2, 4096)) * draw.choice([0.5, 1.0, 2.0]) * 135 / 128
    return {"x": x.bfloat16(), "gamma": (1 + draw.tensor(4096) / 2).bfloat16(), "eps": 0.02}


NORM_BF16 = Exercise(
    "norm_bf16",
    function="norm",
    prepare=prepare,
    accept=[BF16.right],
    dtypes=(torch.bfloat16,),
    cases=[
        Case("2 rows of 8", _BF_HAND),
        Case("other widths", _bf16((2, 5), (5, 120)), hidden=True, points=2, fixed=[
            _bf16((1, 1), (1, 1)), _bf16((2, 2), (256, 256)), _bf16((1, 1), (257, 257)), _bf16((2, 2), (530, 530))]),
        Case("statistics in float32, rounded once", _bf16((3, 4), (60, 130)), hidden=True, points=2, fixed=[
            _long_sums]),
        Case("16 bytes a load and a store", _bf16((2, 4), (65, 140)), hidden=True, points=2, accept=[_wide]),
        Case("x is read twice at most", _bf16((2, 4), (40, 140)), hidden=True, accept=[reads(2)]),
    ],
    idea="Three things have a size of their own here: what is loaded at once, what is computed with, what is stored.",
    hint="Pack p = row[i] for i = threadIdx.x, threadIdx.x + blockDim.x, ... below cols / 8. In a loop over its eight: "
    "float v = __bfloat162float(p.v[j]); sum += v * v. Then the same loop again: p.v[j] = "
    "__float2bfloat16(__bfloat162float(p.v[j]) * rstd * __bfloat162float(g.v[j])); out[i] = p.",
)  # fmt: skip
EXERCISES = [NORM_BLOCK, NORM_WARP, NORM_REGISTERS, NORM_BF16]
