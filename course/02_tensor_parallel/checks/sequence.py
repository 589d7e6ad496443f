"""Lab 02, the sequence over tp: tokens gathered before a column layer, summed and scattered after a row layer.

Rank r of t holds the r-th of t equal parts of the tokens. All-gather and reduce-scatter are each other's gradient.
Where all ranks do the same with the gathered tokens, the gradient is whole on each of them, and a rank takes its tokens
of it. Beside the numbers the judge checks that no message is larger than these need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Answer, Case, Draw, Exercise

from .linear import in_whole_numbers

Inputs = list[dict[str, Any]]


def _drive_sequence(exercise: Any, x: Any, w: Any, what: str, tp: Any) -> dict[str, Any]:
    if what == "idle":
        return {}
    x.requires_grad_()
    w = w.contiguous()  # the gather of torch.distributed.nn needs a gradient that is, which is torch's fault
    if what == "gather":
        y = exercise.gather_sequence(x, tp)
    elif what == "same":
        y = exercise.gather_sequence(x, tp, False)
    elif what == "reduce_scatter":
        y, w = exercise.reduce_scatter_sequence(x.mT.contiguous().mT, tp), w.mT.contiguous().mT
    else:
        y = exercise.gather_sequence(x, tp)
        y = exercise.reduce_scatter_sequence((y * w).tanh(), tp) if y.shape == w.shape else y
    if what == "pair" or y.shape == w.shape:  # of another shape there is nothing to go back from; y says so
        (y if what == "pair" else y * w).sum().backward()
    again = exercise.gather_sequence(y.detach(), tp) if what == "reduce_scatter" else y[:0]
    return {"y": y.detach(), "dx": x.grad, "gathered again": again}


Tensors = list[torch.Tensor]


def _gather(parts: Tensors) -> Tensors:
    return [torch.cat(parts)] * len(parts)


def _scatter(wholes: Tensors) -> Tensors:
    return list(torch.stack(wholes).sum(0).chunk(len(wholes)))


def _pair(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    what, busy = ranks[0]["what"], [r for r in ranks if r["what"] != "idle"]
    xs, ws = [r["x"] for r in busy], [r["w"] for r in busy]
    if what == "gather":
        ys, dxs = _gather(xs), _scatter(ws)
    elif what == "same":
        ys, dxs = _gather(xs), list(ws[0].chunk(len(ws)))
    elif what == "reduce_scatter":
        ys, dxs = _scatter(xs), _gather(ws)
    else:
        worked = [(full * w).tanh() for full, w in zip(_gather(xs), ws, strict=True)]
        ys = _scatter(worked)
        dxs = _scatter([(1 - a * a) * w for a, w in zip(worked, ws, strict=True)])
    again = _gather(ys) if what == "reduce_scatter" else [y[:0] for y in ys]
    out = [{"y": y, "dx": dx, "gathered again": g} for y, dx, g in zip(ys, dxs, again, strict=True)]
    return out + [{}] * (len(ranks) - len(busy))


def _tokens(what: str, t: int, idle: int = 0) -> Callable[[Draw], Inputs]:
    """Draw inputs for `t` ranks that share tokens, and for `idle` ranks outside of the group."""

    def inputs(draw: Draw) -> Inputs:
        n, b, h = draw.shape(3, 2, 5)
        rows, back = (t * n, n) if what == "reduce_scatter" else (n, t * n)
        kinds, w = [what] * t + ["idle"] * idle, draw.tensor(back, b, h)
        ws = [w.clone() if what == "same" else draw.tensor(back, b, h) for _ in kinds]
        return [{"x": draw.tensor(rows, b, h), "w": w, "what": kind} for w, kind in zip(ws, kinds, strict=True)]

    return inputs


def _by_hand(what: str) -> Inputs:
    """Two ranks with tokens of one number: 1 and 2 to be gathered, or (1, 2) and (10, 20) to be summed and cut."""
    each = ([1.0, 2.0], [10.0, 20.0]) if what == "reduce_scatter" else ([1.0], [2.0])
    grads = {
        "gather": ([10.0, 20.0], [30.0, 40.0]), "same": ([10.0, 20.0], [10.0, 20.0]), "reduce_scatter": ([3.0], [4.0]),
    }[what]  # fmt: skip
    return [
        {"x": torch.tensor(x).view(-1, 1, 1), "w": torch.tensor(w).view(-1, 1, 1), "what": what}
        for x, w in zip(each, grads, strict=True)
    ]


def _who_share(ranks: Inputs) -> list[list[int]]:
    busy = [r for r, one in enumerate(ranks) if one["what"] != "idle"]
    return [busy, *([r] for r in range(len(ranks)) if r not in busy)]


def _sends_parts(answer: Answer) -> str | None:
    """Check that no more is sent than by an all-gather and a reduce-scatter: an all-to-all or scatters send as
    little."""
    for rank, one in enumerate(answer.evidence):
        if other := {call.name for call in one.calls} - {"all_gather", "reduce_scatter", "all_to_all", "scatter"}:
            return f"rank {rank} calls {min(other)}; an all-gather and a reduce-scatter send less"
        whole = max(answer.inputs[0][name].nbytes for name in ("x", "w"))
        if answer.inputs[0]["what"] == "same":
            if one.nbytes() > whole:
                return f"rank {rank} moves {one.nbytes()} bytes; the gather moves {whole}, and nothing need travel back"
            continue
        most = whole * (5 if answer.inputs[0]["what"] == "pair" else 3)  # one more than is needed, for scatters
        if one.nbytes() > most:
            return f"rank {rank} moves {one.nbytes()} bytes; an all-gather or a reduce-scatter moves {whole} each way"
    return None


SEQUENCE = Exercise(
    "sequence_pair",
    reference=_pair,
    function="gather_sequence",
    drive=_drive_sequence,
    axis={"tp": _who_share},
    accept=[_sends_parts],
    cases=[
        Case("tokens 1 and 2 gathered, gradients 10, 20 and 30, 40; then both ways, and the pair", _by_hand("gather"),
             fixed=[_by_hand("reduce_scatter"), _tokens("pair", 2, idle=1)]),
        Case("gradients 10, 20 on both ranks, which do the same with the tokens; then other sizes", _by_hand("same"),
             fixed=[in_whole_numbers(_tokens("same", 3, idle=1))]),
        Case("gather_sequence: forward and gradient", _tokens("gather", 3), points=2, hidden=True),
        # Last, as its ranks are a part of the world: torch.distributed.nn cannot scatter there, which is torch's fault.
        Case("reduce_scatter_sequence: forward and gradient", _tokens("reduce_scatter", 3), points=2, hidden=True),
    ],
    errors={
        "returned an invalid gradient": "A gradient has another shape than what the forward pass got: after a gather "
        "it is cut again, after a reduce-scatter it is whole again.",
        "returned an incorrect number of gradients": "`backward` returns one value for each input that `forward` gets "
        "beside ctx; for tp and the flag, which have no gradient, None.",
    },
    idea="Take a token's number and follow it: to which ranks does it go, and from which of them does a gradient come "
    "back? Is that a part of the gradient, or all of it?",
    hint="The two are each other's mirror image: all-gather forward has reduce-scatter backward, and the other way "
    "round, along dim 0. An all-reduce would send twice as much. Where all ranks do the same, each has the whole "
    "gradient of all tokens already: it keeps that of its own tokens.",
)  # fmt: skip
