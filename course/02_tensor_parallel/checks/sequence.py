"""Lab 02, the sequence over tp: tokens gathered before a column layer, summed and scattered after a row layer.

Rank r of t holds the r-th of t equal parts of the tokens. All-gather and reduce-scatter are each other's gradient, and
what is judged beside numbers is that nothing larger travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

Inputs = list[dict[str, Any]]


def _drive_sequence(exercise: Any, x: Any, w: Any, what: str, tp: Any) -> dict[str, Any]:
    if what == "idle":
        return {}
    x.requires_grad_()
    w = w.contiguous()  # the gather of torch.distributed.nn needs a gradient that is, which is torch's fault
    if what == "gather":
        y = exercise.gather_sequence(x, tp)
    elif what == "reduce_scatter":
        y, w = exercise.reduce_scatter_sequence(x.mT.contiguous().mT, tp), w.mT.contiguous().mT
    else:
        y = exercise.gather_sequence(x, tp)
        y = exercise.reduce_scatter_sequence((y * w).tanh(), tp) if y.shape == w.shape else y
    if what == "pair" or y.shape == w.shape:  # of another shape there is nothing to go back from; y says so
        (y if what == "pair" else y * w).sum().backward()
    again = exercise.gather_sequence(y.detach(), tp) if what == "reduce_scatter" else y[:0]
    return {"y": y.detach(), "dx": x.grad, "gathered again": again}


def _sequence(ranks: Inputs, gather_sums: bool = True, whole: bool = True) -> list[dict[str, torch.Tensor]]:
    """`gather_sums`: in the gather's backward; `whole`: the reduce-scatter's gradient goes back to every rank."""
    what, busy = ranks[0]["what"], [r for r in ranks if r["what"] != "idle"]
    if what == "gather":
        out = _gathered(busy, gather_sums)
    elif what == "reduce_scatter":
        out = _scattered(busy, whole)
    else:
        out = _pair(busy, gather_sums, whole)
    again = torch.cat([one["y"] for one in out]) if what == "reduce_scatter" else out[0]["y"][:0]
    return [{**one, "gathered again": again} for one in out] + [{}] * (len(ranks) - len(busy))


def _gathered(ranks: Inputs, summed: bool) -> list[dict[str, torch.Tensor]]:
    ws = [r["w"] for r in ranks]
    y, total = torch.cat([r["x"] for r in ranks]), torch.stack(ws).sum(0)
    each = [total if summed else w for w in ws]
    return [{"y": y, "dx": d.chunk(len(ranks))[r]} for r, d in enumerate(each)]


def _back(grads: list[torch.Tensor], rank: int, whole: bool) -> torch.Tensor:
    """The gradients of all ranks' tokens, or zeros but for this rank's."""
    return torch.cat([grad if whole or i == rank else torch.zeros_like(grad) for i, grad in enumerate(grads)])


def _scattered(ranks: Inputs, whole: bool) -> list[dict[str, torch.Tensor]]:
    ws = [r["w"] for r in ranks]
    parts = torch.stack([r["x"] for r in ranks]).sum(0).chunk(len(ranks))
    return [{"y": part, "dx": _back(ws, r, whole)} for r, part in enumerate(parts)]


def _pair(ranks: Inputs, summed: bool, whole: bool) -> list[dict[str, torch.Tensor]]:
    full, ws = torch.cat([r["x"] for r in ranks]), [r["w"] for r in ranks]
    worked = [(full * w).tanh() for w in ws]
    parts = torch.stack(worked).sum(0).chunk(len(ranks))
    ones = [torch.ones_like(part) for part in parts]
    grads = [_back(ones, r, whole) * (1 - a * a) * w for r, (a, w) in enumerate(zip(worked, ws, strict=True))]
    total = torch.stack(grads).sum(0)
    each = [(total if summed else grad).chunk(len(ranks))[r] for r, grad in enumerate(grads)]
    return [{"y": part, "dx": dx} for part, dx in zip(parts, each, strict=True)]


def _tokens(what: str, t: int, idle: int = 0) -> Callable[[Draw], Inputs]:
    """`t` ranks that share tokens, and some that have nothing to do with them."""

    def inputs(draw: Draw) -> Inputs:
        n, b, h = draw.shape(3, 2, 5)
        rows = {"gather": (n, t * n), "reduce_scatter": (t * n, n), "pair": (n, t * n)}[what]
        kinds = [what] * t + ["idle"] * idle
        return [{"x": draw.tensor(rows[0], b, h), "w": draw.tensor(rows[1], b, h), "what": kind} for kind in kinds]

    return inputs


def _by_hand(what: str) -> Inputs:
    """Two ranks, tokens of one number: 1 and 2 gathered, or (1, 2) and (10, 20) summed and cut."""
    each = {"gather": ([1.0], [2.0]), "reduce_scatter": ([1.0, 2.0], [10.0, 20.0])}[what]
    grads = {"gather": ([10.0, 20.0], [30.0, 40.0]), "reduce_scatter": ([3.0], [4.0])}[what]
    return [
        {"x": torch.tensor(x).view(-1, 1, 1), "w": torch.tensor(w).view(-1, 1, 1), "what": what}
        for x, w in zip(each, grads, strict=True)
    ]


def _who_share(ranks: Inputs) -> list[list[int]]:
    busy = [r for r, one in enumerate(ranks) if one["what"] != "idle"]
    return [busy, *([r] for r in range(len(ranks)) if r not in busy)]


def _sends_parts(answer: Answer) -> str | None:
    """An all-gather and a reduce-scatter, or what sends as little: an all-to-all, or each rank's scatter."""
    for rank, one in enumerate(answer.evidence):
        if other := {call.name for call in one.calls} - {"all_gather", "reduce_scatter", "all_to_all", "scatter"}:
            return f"rank {rank} calls {min(other)}; an all-gather and a reduce-scatter send less"
        whole = max(answer.inputs[0][name].nbytes for name in ("x", "w"))
        most = whole * (5 if answer.inputs[0]["what"] == "pair" else 3)  # one more than is needed, for scatters
        if one.nbytes() > most:
            return f"rank {rank} moves {one.nbytes()} bytes; an all-gather or a reduce-scatter moves {whole} each way"
    return None


SEQUENCE = Exercise(
    "sequence_pair",
    reference=_sequence,
    function="gather_sequence",
    drive=_drive_sequence,
    axis={"tp": _who_share},
    accept=[_sends_parts],
    cases=[
        Case(
            "tokens 1 and 2 gathered, gradients 10, 20 and 30, 40; then both ways, and the pair",
            _by_hand("gather"),
            fixed=[_by_hand("reduce_scatter"), _tokens("pair", 2, idle=1)],
        ),
        Case("gather_sequence: forward and gradient", _tokens("gather", 3), points=2, hidden=True),
        # Last, as its ranks are a part of the world: torch.distributed.nn cannot scatter there, which is torch's fault.
        Case("reduce_scatter_sequence: forward and gradient", _tokens("reduce_scatter", 3), points=2, hidden=True),
    ],
    mistakes=[
        # Around the pair of two ranks both give the same; the gather alone has been tried before it.
        Mistake(
            lambda ranks: _sequence(ranks, whole=False),
            "Each rank's tokens are a sum over all ranks' inputs, so every rank needs the gradient of every token; "
            "yours has only its own.",
        ),
        Mistake(
            lambda ranks: _sequence(ranks, gather_sums=False),
            "Every rank used the gathered tokens for other work: their gradients must be summed, then cut; yours are "
            "only cut.",
        ),
    ],
    idea="Take a token's number and follow it: to which ranks does it go, and from which of them does a gradient come "
    "back?",
    hint="The two are each other's mirror image: all-gather forward has reduce-scatter backward, and the other way "
    "round, along dim 0. An all-reduce would send twice as much.",
)
