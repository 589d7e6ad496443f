"""Checks of lab 07, first part: what a norm moves, the roofline, and RMSNorm in CUDA C++ up a ladder.

A kernel is judged by what it returns, in several orders of its threads, and by what it did to memory, as the emulator
counted it: how often x was read, how many of the served bytes were asked for, how wide a load was, how many barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Accept, Answer, Case, Draw, Exercise, Mistake

# ------------------------------------------------------------------------------------------------------ predictions


def norm_bytes(rows: int, cols: int, element_size: int) -> dict[str, int]:
    whole = rows * cols * element_size
    return {"eager": 7 * whole, "fused": 2 * whole}


def _times(eager: int, fused: int) -> Callable[..., dict[str, int]]:
    return lambda rows, cols, element_size: {
        "eager": eager * rows * cols * element_size, "fused": fused * rows * cols * element_size
    }  # fmt: skip


NORM_BYTES = Exercise(
    "norm_bytes",
    reference=norm_bytes,
    cases=[
        Case("4 x 8 in bf16", {"rows": 4, "cols": 8, "element_size": 2}),
        Case("other sizes", lambda draw: {
            "rows": draw.integer(2, 9000), "cols": draw.integer(2, 9000), "element_size": draw.choice([2, 4])},
            hidden=True),
    ],
    mistakes=[
        Mistake(_times(4, 1), "Each operation also *writes* its result; only the mean's is too small to count."),
        Mistake(_times(4, 2), "Each operation also *writes* its result; only the mean's is too small to count."),
        Mistake(_times(8, 2), "The mean reads a whole tensor and writes one number a row: that does not count."),
        Mistake(_times(5, 2), "`* gamma` is an operation of its own: it reads a whole tensor and writes one."),
        Mistake(_times(7, 3), "One kernel could keep the row on the chip between its two uses: read once, write once."),
        Mistake(lambda **i: {k: v // i["element_size"] for k, v in norm_bytes(**i).items()}, "In bytes, not numbers."),
    ],
    hint="square: reads 1, writes 1. mean: reads 1. times rstd: 1 and 1. times gamma: 1 and 1. Fused: 1 and 1.",
)  # fmt: skip


def at_best(flops: float, nbytes: float, peak: float, bandwidth: float) -> dict[str, object]:
    computing, moving = flops / peak, nbytes / bandwidth
    return {
        "intensity": flops / nbytes, "seconds": max(computing, moving),
        "bound": "memory" if moving > computing else "arithmetic",
    }  # fmt: skip


def _machine(draw: Draw) -> dict[str, float]:
    ridge = draw.choice([50.0, 200.0, 300.0])
    bandwidth = 1e12 * draw.integer(1, 8)
    nbytes = 1e6 * draw.integer(1, 900)
    factor = draw.choice([0.01, 0.4, 2.5, 30.0])
    return {"flops": nbytes * ridge * factor, "nbytes": nbytes, "peak": ridge * bandwidth, "bandwidth": bandwidth}


AT_BEST = Exercise(
    "at_best",
    reference=at_best,
    cases=[
        Case("little to compute", {"flops": 4e9, "nbytes": 2e9, "peak": 1e15, "bandwidth": 4e12}),
        Case("much to compute", {"flops": 4e13, "nbytes": 2e9, "peak": 1e15, "bandwidth": 4e12}),
        Case("other machines", _machine, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(lambda **i: {**at_best(**i), "seconds": i["flops"] / i["peak"] + i["nbytes"] / i["bandwidth"]},
                "At best both go on at the same time: the longer one counts, not the sum."),
        Mistake(lambda **i: {**at_best(**i), "intensity": i["nbytes"] / i["flops"]},
                "Arithmetic intensity is FLOP per byte."),
        Mistake(lambda **i: {**at_best(**i), "bound": {"memory": "arithmetic", "arithmetic": "memory"}[
                str(at_best(**i)["bound"])]}, "The bound is what takes longer."),
        Mistake(lambda **i: {**at_best(**i), "seconds": min(i["flops"] / i["peak"], i["nbytes"] / i["bandwidth"])},
                "Both must be done: the longer one counts."),
    ],
    hint="flops/peak and nbytes/bandwidth are two times. The longer one is the answer, and names the bound.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- kernels


def _drive(exercise: Any, x: Any, gamma: Any, eps: float, orders: Any) -> dict[str, Any]:
    ys, wrote = [], []
    for order in orders:
        exercise.kernel.order = order
        ys.append(exercise.norm(x, gamma, eps))
        wrote.append(exercise.kernel.outputs.get("y"))
    return {"ys": ys, "wrote": wrote, "counts": exercise.kernel.counts}


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """In float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma.double()


def _wrong_formulas(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> list[tuple[torch.Tensor, str]]:
    d, g = x.double(), gamma.double()
    squares = d.square()
    return [
        (rms_norm(x, torch.ones_like(gamma), eps), "this is y without gamma"),
        (rms_norm(x, gamma, 0.0), "eps is missing under the root"),
        (d * (squares.sum(-1, keepdim=True) + eps).rsqrt() * g, "the *mean* of the squares: divide the sum by cols"),
        (d * (d.mean(-1, keepdim=True).square() + eps).rsqrt() * g, "the mean of squares, not the square of the mean"),
        (d * (squares.mean(-1, keepdim=True).sqrt() + eps) * g, "divide by the root (rsqrtf), do not multiply with it"),
        (rms_norm(x - x.mean(-1, keepdim=True), gamma, eps), "this is LayerNorm: RMSNorm subtracts no mean"),
    ]


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def _right(answer: Answer) -> str | None:
    """y is right in every order of the threads, and a kernel wrote each element of it once."""
    inputs, ys, counts = answer.inputs, answer.value["ys"], answer.value["counts"]
    x, gamma, eps = inputs["x"], inputs["gamma"], inputs["eps"]
    want = rms_norm(x, gamma, eps)
    if not counts:
        return "no kernel ran: norm must call it"
    for y in ys:
        if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            return f"norm must return a tensor {list(x.shape)} of float32"
    for y, wrote in zip(ys, answer.value["wrote"], strict=True):
        if not isinstance(wrote, torch.Tensor) or not torch.equal(y.nan_to_num(), wrote.nan_to_num()):
            return "norm must return what the kernel wrote into y"
    if any(_close(y, want) for y in ys) and not all(_close(y, want) for y in ys):
        return ("in another order of its threads y differs: one reads shared memory before it is written, or while "
                "another still adds to it. A __syncthreads() is missing")  # fmt: skip
    if not _close(ys[0], want):
        if found := next((why for y, why in _wrong_formulas(x, gamma, eps) if _close(ys[0], y)), None):
            return found
        bad = (~torch.isclose(ys[0].double(), want, rtol=1e-4, atol=1e-5)).nonzero()[0].tolist()
        if not ys[0].isfinite().all():
            return (
                f"y[{bad[0]}, {bad[1]}] is no number (shared memory starts as NaN: who reads it must have written it)"
            )
        return f"y[{bad[0]}, {bad[1]}] is wrong"
    times = counts["y"]["written"] / ys[0].nbytes
    if times != 1:
        return f"it writes y {times:.4g} times; once is enough: do several threads do the same work?"
    return None


def _reads(most: float) -> Accept:
    def accept(answer: Answer) -> str | None:
        times = answer.value["counts"]["x"]["read"] / answer.inputs["x"].nbytes
        return f"it reads x {times:.4g} times; {most:g} are enough" if times > most else None

    return accept


def _coalesced(answer: Answer) -> str | None:
    share = answer.value["counts"]["x"]["share"]
    if share < 0.6:
        return (f"of the bytes that memory serves for x, {share:.0%} are asked for: neighbouring threads must read "
                "neighbouring numbers")  # fmt: skip
    return None


def _wide(answer: Answer) -> str | None:
    x, y = answer.value["counts"]["x"], answer.value["counts"]["y"]
    width, out = x["read"] / max(1, x["loads"]), y["written"] / max(1, y["stores"])
    if width < 15.9:
        return f"a load of x brings {width:.3g} bytes; with float4 it brings 16 (cols is a multiple of 4 here)"
    return f"a store to y takes {out:.3g} bytes; with float4 it takes 16" if out < 15.9 else None


def _few_barriers(answer: Answer) -> str | None:
    met = answer.value["counts"]["barriers"]
    return f"a thread meets __syncthreads {met:.3g} times; 2 are enough: a warp adds by shuffles" if met > 2 else None


def _sizes(rows: tuple[int, int], cols: tuple[int, int], orders: tuple[int, ...], step: int = 1, off: int = 0) -> Any:
    def inputs(draw: Draw) -> dict[str, Any]:
        r, c = draw.integer(*rows), draw.integer(*cols) * step + off
        return {
            "x": draw.tensor(r, c) * draw.choice([0.03, 1.0, 5.0]), "gamma": 1 + draw.tensor(c) / 2, "eps": 1e-3,
            "orders": list(orders),
        }  # fmt: skip

    return inputs


_HAND = {
    "x": torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]]), "gamma": torch.tensor([1.0, 2.0, 1.0, -1.0]),
    "eps": 0.0, "orders": [0],
}  # fmt: skip
_ANY = (0, 1, 2, 3, 4)

NORM_ROWS = Exercise(
    "norm_rows",
    drive=_drive,
    kernels=True,
    accept=[_right],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("one row, one column", _sizes((1, 1), (1, 1), (0,)), hidden=True),
        Case("rows that do not fill the last block", _sizes((65, 90), (3, 40), (0, 1)), hidden=True, points=2),
        Case("x is read twice at most", _sizes((3, 40), (3, 40), (0,)), hidden=True, accept=[_reads(2)]),
    ],
    hint="row = blockIdx.x * blockDim.x + threadIdx.x; return if row >= rows. A loop over cols adds the squares; then "
    "rsqrtf(sum / cols + eps); a second loop writes y.",
)

NORM_BLOCK = Exercise(
    "norm_block",
    drive=_drive,
    kernels=True,
    accept=[_right],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("fewer columns than threads, and more", _sizes((2, 6), (40, 700), (0,)), hidden=True, points=2),
        Case("in any order of the threads", _sizes((2, 4), (260, 600), _ANY), hidden=True, points=2),
        Case("neighbouring threads read neighbouring numbers", _sizes((3, 6), (300, 600), (0,)), hidden=True, accept=[
            _coalesced]),
        Case("x is read twice at most", _sizes((3, 6), (100, 500), (0,)), hidden=True, accept=[_reads(2)]),
    ],
    hint="Thread t takes columns t, t + blockDim.x, ... It puts its sum into parts[t]. Then, with a __syncthreads() "
    "before each step: for s = blockDim.x / 2, /4, ..., 1 the threads below s add parts[t + s] to parts[t].",
)  # fmt: skip

NORM_WARP = Exercise(
    "norm_warp",
    drive=_drive,
    kernels=True,
    accept=[_right, _reads(2)],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("columns that are no multiple of 4", _sizes((2, 6), (10, 170), (0,), 4, 1), hidden=True),
        Case("columns that are", _sizes((2, 6), (10, 260), (0,), 4), hidden=True),
        Case("in any order of the threads", _sizes((2, 4), (65, 140), _ANY, 4), hidden=True),
        Case("two barriers at most", _sizes((2, 4), (65, 140), (0,), 4), hidden=True, accept=[_few_barriers]),
        Case("16 bytes a load and a store", _sizes((2, 4), (65, 140), (0,), 4), hidden=True, points=2, accept=[_wide]),
    ],
    hint="A warp: for o = 16, 8, 4, 2, 1: v += __shfl_xor_sync(0xffffffff, v, o). Lane 0 of each warp writes "
    "parts[warp]; one __syncthreads(); then every warp adds up parts in the same way, lanes beyond the warps with 0. "
    "A row starts at a multiple of 16 bytes only if cols % 4 == 0: else go number by number.",
)
EXERCISES = [NORM_BYTES, AT_BEST, NORM_ROWS, NORM_BLOCK, NORM_WARP]
