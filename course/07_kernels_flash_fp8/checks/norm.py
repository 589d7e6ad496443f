"""Checks of lab 07, first part: what a norm moves, the roofline, and RMSNorm in CUDA C++ up a ladder.

A kernel is judged by what it wrote, in several orders of its threads, and by what it did to memory, as the emulator in
the judge's process counted it: how often x was read, how many of the served bytes were asked for, how wide a load was,
how many barriers. One launch must do it, from x and gamma as they were given.
"""

from __future__ import annotations

import math
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


def _launch(answer: Answer) -> dict[str, Any]:
    return answer.evidence[0].launches[0]


def _given(answer: Answer) -> str | None:
    """One launch, of x, gamma and eps as norm got them: so what is in y came into being in the kernel."""
    launches = answer.evidence[0].launches
    if not launches:
        return "no kernel ran: norm must call it"
    if failed := next((one for one in launches if one["error"]), None):
        return f"{failed['error']}"
    if len(launches) > 1:
        return f"norm launches {len(launches)} kernels; one launch computes all rows"
    x, gamma, eps = (answer.inputs[name] for name in ("x", "gamma", "eps"))
    launch = launches[0]
    for name, array in launch["arrays"].items():
        if name not in launch["writes"] and not (_same(array, x) or _same(array, gamma)):
            return f"the kernel gets {name}, which is neither x nor gamma: it computes all from these two"
    if not any(_same(array, x) for name, array in launch["arrays"].items() if name not in launch["writes"]):
        return "the kernel does not get x: it computes y from x"
    known = [eps, 1 / x.shape[1], *map(float, x.shape)]
    for name, number in launch["numbers"].items():
        fits = abs(number) <= 4 * x.numel() if isinstance(number, int) else any(
            abs(number - one) <= 1e-6 * abs(one) for one in known)  # fmt: skip
        if not fits and float(number) not in known:
            return f"the kernel gets {name} = {number:.6g}, which is neither eps nor a size"
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, in any shape."""
    return one.dtype == other.dtype and one.numel() == other.numel() and torch.equal(
        one.flatten().view(torch.int32), other.contiguous().flatten().view(torch.int32))  # fmt: skip


def _right(answer: Answer) -> str | None:
    """y is right in every order of the threads, and one launch of a kernel wrote each element of it once."""
    if sentence := _given(answer):
        return sentence
    y, launch = answer.value, _launch(answer)
    x, gamma, eps = (answer.inputs[name] for name in ("x", "gamma", "eps"))
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return f"norm must return a tensor {list(x.shape)} of float32"
    first = launch["outputs"][0]
    name = next((name for name in first if _same(first[name].nan_to_num(), y.nan_to_num())), None)
    if name is None:
        return "norm must return what the kernel wrote into y"
    writes = launch["writes"][name].view(x.shape)
    if not writes.all():
        row, col = (writes == 0).nonzero()[0].tolist()
        return f"y[{row}, {col}] was never written, and {(writes == 0).sum()} of {y.numel()} numbers in all"
    want = rms_norm(x, gamma, eps)
    right = [_close(outputs[name].view(x.shape), want) for outputs in launch["outputs"]]
    if any(right) and not all(right):
        return "in another order of its threads y differs: one reads what another has not written yet, or overwrites it"
    if not right[0]:
        return _what_is_wrong(answer, y, want)
    if sentence := _on_others(launch, name, x, gamma, eps):
        return sentence
    times = launch["counts"][name]["written"] / y.nbytes
    if times != 1:
        return f"it writes y {times:.4g} times; once is enough: do several threads do the same work?"
    return None


def _on_others(launch: dict[str, Any], name: str, x: torch.Tensor, gamma: torch.Tensor, eps: float) -> str | None:
    """The same launch on another x and gamma: what Python computed from x, and passed as numbers, is wrong there."""
    other = launch["other"] or {"arrays": {}, "outputs": {}}

    def drawn(array: torch.Tensor) -> torch.Tensor | None:
        places = (what for what in other["arrays"] if _same(launch["arrays"][what], array))
        return next((other["arrays"][what].view(array.shape) for what in places), None)

    one, scale = drawn(x), drawn(gamma)
    if one is None or not _close(
        other["outputs"][name].view(x.shape), rms_norm(one, gamma if scale is None else scale, eps)
    ):
        return "with the same numbers and another x the kernel is wrong: what depends on x is computed in the kernel"
    return None


def _what_is_wrong(answer: Answer, y: torch.Tensor, want: torch.Tensor) -> str:
    note = _launch(answer)["note"]
    if found := next((why for other, why in _wrong_formulas(**answer.inputs) if _close(y, other)), None):
        return found
    row, col = (~torch.isclose(y.double(), want, rtol=1e-4, atol=1e-5)).nonzero()[0].tolist()
    got = "no number" if y[row, col].isnan() else f"{y[row, col]:.6g}"
    return f"y[{row}, {col}] is {got}, expected {want[row, col]:.6g}{f' ({note})' if note else ''}"


def _reads(most: float) -> Accept:
    def accept(answer: Answer) -> str | None:
        read = sum(of["read"] for of in _counts_of(answer, "x"))
        times = read / answer.inputs["x"].nbytes
        return f"it reads x {times:.4g} times; {most:g} are enough" if times > most else None

    return accept


def _counts_of(answer: Answer, what: str) -> list[dict[str, Any]]:
    """The counts of the arrays that hold an input."""
    launch = _launch(answer)
    names = [name for name, array in launch["arrays"].items() if name not in launch["writes"]]
    return [launch["counts"][name] for name in names if _same(launch["arrays"][name], answer.inputs[what])]


def _coalesced(answer: Answer) -> str | None:
    counts = _counts_of(answer, "x")
    share = sum(of["read"] for of in counts) / max(1, sum(of["served"] for of in counts))
    if share < 0.6:
        return (f"of the bytes that memory serves for x, {share:.0%} are asked for: neighbouring threads must read "
                "neighbouring numbers")  # fmt: skip
    return None


def _wide(answer: Answer) -> str | None:
    counts, launch = _counts_of(answer, "x"), _launch(answer)
    width = sum(of["read"] for of in counts) / max(1, sum(of["loads"] for of in counts))
    stored = [launch["counts"][name] for name in launch["writes"]]
    out = sum(of["written"] for of in stored) / max(1, sum(of["stores"] for of in stored))
    if width < 15.9:
        return f"a load of x brings {width:.3g} bytes; with float4 it brings 16 (cols is a multiple of 4 here)"
    return f"a store to y takes {out:.3g} bytes; with float4 it takes 16" if out < 15.9 else None


def _few_barriers(answer: Answer) -> str | None:
    met = _launch(answer)["counts"]["barriers"]
    return f"a thread meets __syncthreads {met:.3g} times; 2 are enough: a warp adds by shuffles" if met > 2 else None


def _tree(answer: Answer) -> str | None:
    """No thread reads as many parts as a thread does that adds up all of them alone."""
    launch = _launch(answer)
    loads, threads = launch["counts"]["shared_loads"], launch["block"]
    most = max(2 * math.ceil(math.log2(threads)) + 8, threads // 2)
    if loads > most:
        return (f"one thread reads shared memory {loads} times while others wait; in a tree of {threads} threads it is "
                f"{2 * math.ceil(math.log2(threads)) + 1} times")  # fmt: skip
    return None


def _sizes(rows: tuple[int, int], cols: tuple[int, int], step: int = 1, off: int = 0) -> Any:
    def inputs(draw: Draw) -> dict[str, Any]:
        r, c = draw.integer(*rows), draw.integer(*cols) * step + off
        x = draw.tensor(r, c) * draw.choice([0.03, 1.0, 5.0])
        return {"x": x, "gamma": 1 + draw.tensor(c) / 2, "eps": 1e-3}

    return inputs


_HAND = {
    "x": torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, -1.0, 1.0, -1.0]]), "gamma": torch.tensor([1.0, 2.0, 1.0, -1.0]),
    "eps": 0.0,
}  # fmt: skip

NORM_ROWS = Exercise(
    "norm_rows",
    function="norm",
    kernels=True,
    accept=[_right],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("one row, one column", _sizes((1, 1), (1, 1)), hidden=True),
        Case(
            "rows that do not fill the last block",
            _sizes((65, 90), (3, 40)),
            hidden=True,
            points=2,
            fixed=[_sizes((64, 64), (3, 3)), _sizes((129, 129), (2, 2))],
        ),
        Case("x is read twice at most", _sizes((3, 40), (3, 40)), hidden=True, accept=[_reads(2)]),
    ],
    hint="row = blockIdx.x * blockDim.x + threadIdx.x; return if row >= rows. A loop over cols adds the squares; then "
    "rsqrtf(sum / cols + eps); a second loop writes y.",
)

NORM_BLOCK = Exercise(
    "norm_block",
    function="norm",
    kernels=True,
    accept=[_right],
    cases=[
        Case("2 rows of 4", _HAND),
        Case("fewer columns than threads, and more", _sizes((2, 6), (40, 700)), hidden=True, points=2, fixed=[
            _sizes((2, 2), (9, 9)), _sizes((3, 3), (256, 256)), _sizes((2, 2), (300, 600))]),
        Case("the parts come together in a tree, not in one thread", _sizes((2, 4), (260, 600)), hidden=True, points=2,
             accept=[_reads(2), _tree]),
        Case("neighbouring threads read neighbouring numbers", _sizes((3, 6), (520, 600)), hidden=True, accept=[
            _coalesced]),
        Case("x is read twice at most", _sizes((3, 6), (100, 500)), hidden=True, accept=[_reads(2)]),
    ],
    hint="Thread t takes columns t, t + blockDim.x, ... It puts its sum into parts[t]. Then, with a __syncthreads() "
    "before each step: for s = blockDim.x / 2, /4, ..., 1 the threads below s add parts[t + s] to parts[t].",
)  # fmt: skip

NORM_WARP = Exercise(
    "norm_warp",
    function="norm",
    kernels=True,
    accept=[_right, _reads(2)],
    cases=[
        Case("2 rows of 4", _HAND),
        Case(
            "columns that are no multiple of 4",
            _sizes((2, 6), (10, 170), 4, 1),
            hidden=True,
            fixed=[_sizes((2, 2), (1, 1), 1, 2), _sizes((2, 2), (150, 150), 4, 3)],
        ),
        Case("columns that are", _sizes((2, 6), (10, 260), 4), hidden=True),
        Case(
            "one column to more than 1024",
            _sizes((2, 3), (257, 300), 4),
            hidden=True,
            fixed=[_sizes((2, 2), (1, 1)), _sizes((1, 1), (1, 1), 4)],
        ),
        Case("two barriers at most", _sizes((2, 4), (65, 140), 4), hidden=True, accept=[_few_barriers]),
        Case("16 bytes a load and a store", _sizes((2, 4), (65, 140), 4), hidden=True, points=2, accept=[_wide]),
    ],
    hint="A warp: for o = 16, 8, 4, 2, 1: v += __shfl_xor_sync(0xffffffff, v, o). Lane 0 of each warp writes "
    "parts[warp]; one __syncthreads(); then every warp adds up parts in the same way, lanes beyond the warps with 0. "
    "A row starts at a multiple of 16 bytes only if cols % 4 == 0: else go number by number.",
)
EXERCISES = [NORM_BYTES, AT_BEST, NORM_ROWS, NORM_BLOCK, NORM_WARP]
