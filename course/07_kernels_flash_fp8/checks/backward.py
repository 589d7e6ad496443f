"""Checks of lab 07, third part: RMSNorm's backward pass, whose gradient of gamma is a sum over all rows.

Two launches are judged together: what the first leaves in memory for the second, and whether any order of the threads
gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from course.lab07.compiling import prepare
from labkit.exercises import Answer, Case, Draw, Exercise

from .launched import close, same
from .norm import rms_norm


def backward(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dgamma in float64, by autograd."""
    leaves = [t.double().requires_grad_() for t in (x, gamma)]
    dx, dgamma = torch.autograd.grad(rms_norm(leaves[0], leaves[1], eps), leaves, dy.double())
    return dx, dgamma


def _launches(answer: Answer) -> list[dict[str, Any]]:
    return list(answer.evidence[0].notes.get("launch", []))


def _wrong_sums(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, eps: float, blocks: int) -> list[Any]:
    d, dyd, g = x.double(), dy.double(), gamma.double()
    normed = d * (d.square().mean(-1, keepdim=True) + eps).rsqrt()
    each = dyd * normed
    rows = torch.arange(len(x))
    return [
        ((dyd * d).sum(0), "this is the sum of dy times x: times x / root, the normed row, is asked for"),
        ((each * g).sum(0), "gamma is a factor of dx, not of its own gradient"),
        (dyd.sum(0), "this is the sum of dy: the gradient of an added bias"),
        (each.mean(0), "the mean over the rows in place of their sum"),
        (each[rows < blocks].sum(0), "only the first row of each block counts"),
        (each[rows % blocks == 0].sum(0), "only the rows of block 0 count: add up the parts of all blocks"),
        (each[rows % blocks == (len(x) - 1) % blocks].sum(0), "only the rows of one block count: add up all parts"),
        (torch.stack([each[rows % blocks == b][-1] for b in range(min(blocks, len(x)))]).sum(0),
         "only the last row of each block counts: the sum goes on from row to row"),
    ]  # fmt: skip


def _right(answer: Answer) -> str | None:
    i, value, launches = answer.inputs, answer.value, _launches(answer)
    if failed := next((one for one in launches if one["error"]), None):
        return f"{failed['error']}"
    if not launches:
        return "no kernel ran: norm_backward must call it"
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(t, torch.Tensor) for t in value)):
        return "return dx and dgamma"
    (dx, dgamma), (want_dx, want) = value, backward(i["dy"], i["x"], i["gamma"], i["eps"])
    if dx.shape != want_dx.shape or dgamma.shape != want.shape:
        return f"dx has the shape {list(want_dx.shape)}, dgamma {list(want.shape)}"
    for name, got in (("dx", dx), ("dgamma", dgamma)):
        if not any(same(one, got) for launch in launches for one in launch["outputs"][0].values()):
            return f"{name} must be what a kernel wrote"
    if any(launch["counts"]["atomics"] for launch in launches) and (_orders(launches) or not close(dgamma, want)):
        return ("atomicAdd adds floats in the order in which the blocks come: other last bits each time, and memory "
                "that must be 0 before; give each block a row of its own in `partial`")  # fmt: skip
    if sentence := _orders(launches):
        return sentence
    if not close(dx, want_dx):
        return f"dx{_first(dx, want_dx)} is wrong: that part was given"
    if not close(dgamma, want):
        wrong = _wrong_sums(i["dy"], i["x"], i["gamma"], i["eps"], i["blocks"])
        found = next((why for other, why in wrong if close(dgamma, other)), None)
        place = _first(dgamma, want)
        note = next((launch["note"] for launch in launches if launch["note"]), "")
        where = tuple(torch.nonzero(~torch.isclose(dgamma.double(), want, rtol=1e-4, atol=1e-5))[0].tolist())
        got = "no number" if dgamma[where].isnan() else f"{dgamma[where]:.6g}"
        if dgamma[where].isnan() and not note:
            written = [launch["writes"][name].flatten()[where] for launch in launches
                       for name, one in launch["outputs"][0].items() if same(one, dgamma)]  # fmt: skip
            note = "a variable that was given no value holds NaN here" if written[0] else "it was never written"
        said = f"dgamma{place} is {got}, expected {want[where]:.6g}"
        return found or (f"{said} ({note})" if note else said)
    return None


def _orders(launches: list[dict[str, Any]]) -> str | None:
    """Check that every order of the threads gives the same bits."""
    for launch in launches:
        first = launch["outputs"][0]
        if name := next((n for n in first for one in launch["outputs"][1:] if not same(one[n], first[n])), None):
            return f"in another order of the threads {name} has other bits: two threads use one word"
    return None


def _first(got: torch.Tensor, want: torch.Tensor) -> str:
    return f"{torch.nonzero(~torch.isclose(got.double(), want, rtol=1e-4, atol=1e-5))[0].tolist()}"


def _few_parts(answer: Answer) -> str | None:
    """Check what goes through memory between the launches, and that x and dy are read once."""
    i, launches = answer.inputs, _launches(answer)
    cols, blocks = i["x"].shape[1], i["blocks"]
    written = [one for launch in launches for one in launch["outputs"][0].values()]
    between = {
        array.numel() for launch in launches[1:] for name, array in launch["arrays"].items()
        if name not in launch["writes"] and any(same(array, one) for one in written)
    }  # fmt: skip
    if between and max(between) > blocks * cols:
        return (f"{max(between)} numbers go through memory between the launches; a row for each block is "
                f"{blocks * cols}")  # fmt: skip
    first = launches[0]
    if first["grid"] < min(blocks, len(i["x"])):
        return f"the first kernel has {first['grid']} of {blocks} blocks: the others would work at the same time"
    for name, array in first["outputs"][0].items():
        if (times := first["counts"][name]["written"] / array.nbytes) > 1:
            return f"{name} is written {times:.3g} times; once is enough, when the block has done its last row"
    for name in ("x", "dy"):
        read = sum(launch["counts"][of]["read"] for launch in launches for of, array in launch["arrays"].items()
                   if of not in launch["writes"] and same(array, i[name]))  # fmt: skip
        if read > i[name].nbytes:
            return f"{name} is read {read / i[name].nbytes:.3g} times; once is enough"
    return None


def _neighbours(answer: Answer) -> str | None:
    """Check that most of the bytes that are fetched for the parts were asked for."""
    launches = _launches(answer)
    read = served = 0
    for launch in launches[1:]:
        for name in launch["arrays"]:
            read, served = read + launch["counts"][name]["read"], served + launch["counts"][name]["served"]
    if served and read / served < 0.6:
        return (f"of the bytes that the second kernel fetches, {read / served:.0%} are asked for: neighbouring threads "
                "must read neighbouring columns")  # fmt: skip
    return None


def _sizes(rows: tuple[int, int], cols: tuple[int, int], blocks: tuple[int, int]) -> Any:
    def inputs(draw: Draw) -> dict[str, Any]:
        r, c = draw.integer(*rows), draw.integer(*cols)
        return {"dy": draw.tensor(r, c), "x": draw.tensor(r, c) * draw.choice([0.5, 1.0, 5.0]),
                "gamma": 1 + draw.tensor(c) / 2, "eps": draw.choice([0.003, 0.02, 0.1]),
                "blocks": draw.integer(*blocks)}  # fmt: skip

    return inputs


_HAND = {
    "dy": torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]]), "x": torch.tensor([[2.0, 2.0], [3.0, 3.0], [1.0, -1.0]]),
    "gamma": torch.tensor([1.0, 2.0]), "eps": 0.0, "blocks": 2,
}  # fmt: skip

NORM_BACKWARD = Exercise(
    "norm_backward",
    prepare=prepare,
    accept=[_right],
    cases=[
        Case("3 rows of 2, on 2 blocks: dgamma is (4, 1)", _HAND),
        Case("other sizes, the same bits in every order", _sizes((7, 11), (40, 260), (2, 5)), hidden=True, points=2,
             fixed=[_sizes((7, 7), (257, 257), (3, 3)), _sizes((3, 3), (1024, 1024), (2, 2)),
                    _sizes((4, 4), (30, 30), (4, 4)), _sizes((6, 6), (9, 9), (1, 1))]),
        Case("more blocks than rows", _sizes((2, 3), (40, 60), (5, 6)), hidden=True),
        Case("a row for each block goes through memory; x and dy are read once", _sizes((9, 12), (60, 260), (3, 4)),
             hidden=True, points=2, accept=[_few_parts]),
        Case("neighbouring threads read neighbouring columns", _sizes((13, 16), (270, 290), (9, 12)), hidden=True,
             accept=[_neighbours]),
    ],
    idea="A thread has the same columns in every row of its block. What is left when the block is done, and who adds "
    "up the blocks?",
    hint="Before the loop over rows: float of_gamma[PER] = {}; in it: of_gamma[k] += kept_dy[k] * kept_x[k] * rstd; "
    "after it: partial[blockIdx.x * cols + i] = of_gamma[k] for the columns i < cols. column_sums: i = blockIdx.x * "
    "blockDim.x + threadIdx.x; if i < cols: add partial[p * cols + i] for p = 0 to parts - 1; dgamma[i] = sum. Grid: "
    "(cols + 255) // 256.",
)  # fmt: skip
EXERCISES = [NORM_BACKWARD]
