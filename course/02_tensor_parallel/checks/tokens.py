"""Lab 02, tokens over tp: rows of a cut table, a loss whose logits never meet, tokens gathered and scattered.

Rank r of t owns the ids [r n, (r + 1) n), or the r-th of t equal parts of the sequence. What is judged beside numbers
is what travels: the table and the logits never do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import at_most, count, only
from labkit.exercises import Case, Draw, Exercise, Mistake

Inputs = list[dict[str, Any]]

# ---------------------------------------------------------------------------------------------------- embedding


def _drive_embedding(exercise: Any, ids: Any, weight: Any, dy: Any) -> dict[str, Any]:
    from minimegatron.comm.mesh import Axis

    weight.requires_grad_()
    y = exercise.embedding(ids, weight, Axis.world("tp"))
    y.backward(dy)
    return {"y": y.detach(), "dw": weight.grad}


def _embedding(ranks: Inputs, masked: bool = True, summed: bool = True) -> list[dict[str, torch.Tensor]]:
    parts, n = [], ranks[0]["weight"].shape[0]
    for rank, r in enumerate(ranks):
        weight = r["weight"].clone().requires_grad_()
        local = r["ids"] - rank * n
        own = (local >= 0) & (local < n)
        rows = F.embedding(local.clamp(0, n - 1), weight)
        rows = rows * own.unsqueeze(-1) if masked else rows
        rows.backward(r["dy"])
        parts.append({"y": rows.detach(), "dw": weight.grad})
    total = torch.stack([p["y"] for p in parts]).sum(0)
    return [{"y": total if summed else p["y"], "dw": p["dw"]} for p in parts]


def _ids(draw: Draw) -> Inputs:
    t, n, s, b, h = draw.integer(2, 4), draw.integer(8, 20), draw.integer(3, 6), draw.integer(1, 3), draw.integer(2, 4)
    ids = torch.tensor([[draw.integer(0, t * n - 1) for _ in range(b)] for _ in range(s)])
    dy = draw.tensor(s, b, h)
    return [{"ids": ids.clone(), "weight": draw.tensor(n, h), "dy": dy.clone()} for _ in range(t)]


def _borders(draw: Draw) -> Inputs:
    out = _ids(draw)
    t, n = len(out), out[0]["weight"].shape[0]
    ids = torch.tensor([[r * n] for r in range(t)] + [[r * n + n - 1] for r in range(t)])
    dy = draw.tensor(2 * t, 1, out[0]["weight"].shape[1])
    return [{"ids": ids.clone(), "weight": r["weight"], "dy": dy.clone()} for r in out]


EMBEDDING = Exercise(
    "embedding",
    reference=_embedding,
    drive=_drive_embedding,
    cases=[
        Case("the first and the last id of every rank", _borders, hidden=True),
        Case("rows and their gradients", _ids, points=2, hidden=True),
        Case(
            "one sum of [s, b, h], nothing backward", _ids, hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("s*b*h elements", lambda i: i[0]["dy"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _embedding(ranks, masked=False),
            "Ids of other ranks must give zeros here; yours give some row of this rank's, which enters the sum.",
        ),
        Mistake(lambda ranks: _embedding(ranks, summed=False), "These are this rank's rows only: sum over ranks (g)."),
    ],
    hint="Rank r owns ids [r n, (r+1) n). Look up id - r n where it is owned, zeros elsewhere, then g. The table "
    "itself never travels.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ cross entropy


def _drive_loss(exercise: Any, logits: Any, target: Any, dloss: Any) -> dict[str, Any]:
    from minimegatron.comm.mesh import Axis

    logits.requires_grad_()
    loss = exercise.cross_entropy(logits, target, Axis.world("tp"))
    loss.backward(dloss)
    return {"loss": loss.detach(), "dz": logits.grad}


def _cross_entropy(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    z = torch.cat([r["logits"].double() for r in ranks], -1).requires_grad_()
    loss = F.cross_entropy(z.flatten(0, 1), ranks[0]["target"].flatten(), reduction="none").view_as(ranks[0]["target"])
    loss.backward(ranks[0]["dloss"].double())
    assert z.grad is not None, "the reference has a gradient"
    return [{"loss": loss.detach().float(), "dz": dz.float()} for dz in z.grad.chunk(len(ranks), -1)]


def _by_parts(local_softmax: bool, global_max: bool = True) -> Callable[[Inputs], list[dict[str, torch.Tensor]]]:
    """The loss whose softmax is normalised, or whose maximum is taken, over the local vocabulary only."""

    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        n, target, dloss = ranks[0]["logits"].shape[-1], ranks[0]["target"], ranks[0]["dloss"]
        zs = [r["logits"] - r["logits"].amax(-1, keepdim=True) * (0 if global_max else 1) for r in ranks]
        sums = [z.exp().sum(-1) for z in zs]
        total = torch.stack(sums).sum(0)
        own = [(target >= r * n) & (target < (r + 1) * n) for r in range(len(zs))]
        at = [(target - r * n).clamp(0, n - 1).unsqueeze(-1) for r in range(len(zs))]
        picked = sum(z.gather(-1, i).squeeze(-1) * o for z, i, o in zip(zs, at, own, strict=True))
        out = []
        for z, s, i, o in zip(zs, sums, at, own, strict=True):
            partition = s if local_softmax else total
            dz = z.exp() / partition.unsqueeze(-1)
            dz = dz.scatter_add(-1, i, -o.unsqueeze(-1).float()) * dloss.unsqueeze(-1)
            out.append({"loss": partition.log() - picked, "dz": dz})
        return out

    return answer


def _upstream_lost(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _cross_entropy(ranks)
    dloss = ranks[0]["dloss"].unsqueeze(-1)
    return [{"loss": a["loss"], "dz": a["dz"] / dloss} for a in right]


def _not_the_target(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    z = torch.cat([r["logits"] for r in ranks], -1)
    dz = z.softmax(-1) * ranks[0]["dloss"].unsqueeze(-1)
    parts = dz.chunk(len(ranks), -1)
    return [{"loss": a["loss"], "dz": p} for a, p in zip(_cross_entropy(ranks), parts, strict=True)]


def _logits(scale: float = 1.0) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        t, n, s, b = draw.integer(2, 4), draw.integer(40, 60), draw.integer(2, 5), draw.integer(1, 3)
        target = torch.tensor([[draw.integer(0, t * n - 1) for _ in range(b)] for _ in range(s)])
        target[0, 0], target[1, 0] = n - 1, n
        dloss = draw.tensor(s, b)
        parts = [scale * draw.tensor(s, b, n) for _ in range(t)]
        return [{"logits": z, "target": target.clone(), "dloss": dloss.clone()} for z in parts]

    return inputs


def _few_numbers(inputs: Inputs) -> float:
    """Three fp32 numbers a token, or their gathered parts and two more; the logits would be forty a rank."""
    return 4 * (len(inputs) + 2) * inputs[0]["target"].numel()


LOSS = Exercise(
    "cross_entropy",
    reference=_cross_entropy,
    drive=_drive_loss,
    dtypes=(torch.float32,),  # the loss is computed in float32, whatever the logits are
    cases=[
        Case("loss and gradient", _logits(), points=2, hidden=True),
        Case("logits in the hundreds", _logits(300.0), hidden=True),
        Case(
            "a few numbers a token travel, never the logits", _logits(), points=2, hidden=True,
            accept=[at_most("the bound, t + 2 numbers a token,", _few_numbers)],
        ),
    ],
    mistakes=[
        Mistake(
            _by_parts(local_softmax=False),
            "exp() of large logits overflows: subtract the maximum over the whole vocabulary first.",
        ),
        Mistake(
            _by_parts(local_softmax=True),
            "Your softmax is normalised over this rank's words: sum exp(z) over ranks as well.",
        ),
        Mistake(
            _by_parts(local_softmax=False, global_max=False),
            "Each rank subtracted its own maximum: the terms of the sum are on different scales. "
            "Take the max over ranks.",
        ),
        Mistake(_upstream_lost, "The gradient that arrives, one number a token, multiplies dz."),
        Mistake(_not_the_target, "dz is softmax minus one at the target, on the rank that owns it."),
    ],
    hint="max over ranks of the local max; subtract; sum over ranks of exp(z).sum; sum over ranks of the target's "
    "logit, zero where it is not owned; log(sum) - target. Three numbers a token travel forward, none backward.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ sequence pair


def _drive_sequence(exercise: Any, x: Any, w: Any, what: str) -> dict[str, Any]:
    from minimegatron.comm.mesh import Axis

    tp = Axis.world("tp")
    x.requires_grad_()
    if what == "gather":
        y = exercise.gather_sequence(x, tp)
    elif what == "reduce_scatter":
        y = exercise.reduce_scatter_sequence(x, tp)
    else:
        y = exercise.reduce_scatter_sequence((exercise.gather_sequence(x, tp) * w).tanh(), tp)
    (y if what == "pair" else y * w).sum().backward()
    return {"y": y.detach(), "dx": x.grad}


def _sequence(ranks: Inputs, gather_sums: bool = True, whole: bool = True) -> list[dict[str, torch.Tensor]]:
    what, t = ranks[0]["what"], len(ranks)
    ws = [r["w"] for r in ranks]
    if what == "gather":
        y, total = torch.cat([r["x"] for r in ranks]), torch.stack(ws).sum(0)
        each = [total if gather_sums else w for w in ws]
        return [{"y": y, "dx": d.chunk(t)[r]} for r, d in enumerate(each)]
    if what == "reduce_scatter":
        parts = torch.stack([r["x"] for r in ranks]).sum(0).chunk(t)
        back = torch.cat(ws)
        own = [torch.cat([w if i == r else torch.zeros_like(w) for i in range(t)]) for r, w in enumerate(ws)]
        return [{"y": p, "dx": back if whole else own[r]} for r, p in enumerate(parts)]
    xs = [r["x"].clone().requires_grad_() for r in ranks]
    full = torch.cat(xs)
    y = sum((full * w).tanh() for w in ws)
    y.sum().backward()  # type: ignore[union-attr]
    return [{"y": p.detach(), "dx": x.grad} for p, x in zip(y.chunk(t), xs, strict=True)]  # type: ignore[union-attr]


def _tokens(what: str) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        t, n, h = draw.integer(2, 4), draw.integer(1, 4), draw.integer(1, 4)
        rows = {"gather": (n, t * n), "reduce_scatter": (t * n, n), "pair": (n, t * n)}[what]
        return [{"x": draw.tensor(rows[0], 2, h), "w": draw.tensor(rows[1], 2, h), "what": what} for _ in range(t)]

    return inputs


SEQUENCE = Exercise(
    "sequence_pair",
    reference=_sequence,
    function="gather_sequence",
    drive=_drive_sequence,
    accept=[only("all_gather", "reduce_scatter")],
    cases=[
        Case("gather_sequence: forward and gradient", _tokens("gather"), points=2, hidden=True),
        Case("reduce_scatter_sequence: forward and gradient", _tokens("reduce_scatter"), points=2, hidden=True),
        Case("the pair around different work on each rank", _tokens("pair"), hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _sequence(ranks, gather_sums=False),
            "Every rank used the gathered tokens for other work: their gradients must be summed, then cut "
            "(reduce-scatter).",
        ),
        Mistake(
            lambda ranks: _sequence(ranks, whole=False),
            "Each rank's tokens are a sum over all ranks' inputs: the gradient of every token goes back to every rank "
            "(all-gather).",
        ),
    ],
    hint="The two are each other's mirror image: all-gather forward has reduce-scatter backward, and the other way "
    "round, along dim 0. An all-reduce would send twice as much.",
)
