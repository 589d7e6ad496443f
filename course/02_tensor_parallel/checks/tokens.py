"""Lab 02, the vocabulary over tp: rows of a cut table, and a loss whose logits never meet.

Rank r of t owns the ids [r n, (r + 1) n). What is judged beside numbers is what travels: the table and the logits never
do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import at_most, count, only
from labkit.exercises import Case, Draw, Exercise, Mistake
from labkit.wanted import ANYTHING

from .linear import in_whole_numbers

Inputs = list[dict[str, Any]]

# ---------------------------------------------------------------------------------------------------- embedding


def _drive_embedding(exercise: Any, ids: Any, weight: Any, dy: Any, tp: Any) -> dict[str, Any]:
    weight.requires_grad_()
    y = exercise.embedding(ids, weight, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
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


def _dealt_out(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """Id i on rank i modulo t, in row i // t."""
    t, n = len(ranks), ranks[0]["weight"].shape[0]
    return _embedding([{**r, "ids": r["ids"] % t * n + r["ids"] // t} for r in ranks])


def _with_borders(draw: Draw, t: int, n: int, s: int, b: int) -> torch.Tensor:
    """Ids [s, b] of t * n words: first and last ones of the ranks, others, and the last row once more."""
    ids = torch.tensor([[draw.integer(0, t * n - 1) for _ in range(b)] for _ in range(s)])
    ids[0, :2], ids[1, :2] = torch.tensor([n - 1, n]), torch.tensor([0, t * n - 1])
    ids[-1] = ids[-2]
    return ids


def _ids(draw: Draw, t: int = 0) -> Inputs:
    (s, b), n, h = draw.shape(2, 3, 7), draw.integer(8, 20), 2
    t = t or draw.integer(2, 4)
    ids, dy = _with_borders(draw, t, n, s, b), draw.tensor(s, b, h)
    return [{"ids": ids.clone(), "weight": draw.tensor(n, h), "dy": dy.clone()} for _ in range(t)]


def _few_ids() -> Inputs:
    """Five tokens of four words; the rows are 10, 11 on rank 0 and 12, 13 on rank 1."""
    ids = torch.tensor([[0], [3], [1], [2], [2]])
    rows = [torch.tensor([[10.0], [11.0]]), torch.tensor([[12.0], [13.0]])]
    return [{"ids": ids.clone(), "weight": weight, "dy": torch.ones(5, 1, 1)} for weight in rows]


def _borders(draw: Draw) -> Inputs:
    t, n, h = 3, draw.integer(8, 20), draw.integer(3, 5)
    ids = torch.tensor([[r * n] for r in range(t)] + [[r * n + n - 1] for r in range(t)])
    dy = draw.tensor(2 * t, 1, h)
    return [{"ids": ids.clone(), "weight": draw.tensor(n, h), "dy": dy.clone()} for _ in range(t)]


EMBEDDING = Exercise(
    "embedding",
    reference=_embedding,
    drive=_drive_embedding,
    axis="tp",
    cases=[
        Case("2 ranks with 2 words each, ids 0, 3, 1, 2, 2; then the first and last id of 3 ranks", _few_ids(),
             fixed=[in_whole_numbers(_borders)]),
        Case("rows and their gradients", partial(_ids, t=2), points=2, hidden=True),
        Case(
            "right numbers, and one sum of [s, b, h], nothing backward", _ids, hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("s*b*h elements", lambda i: i[0]["dy"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _embedding(ranks, masked=False),
            "Ids of other ranks must give zeros here; yours give some row of this rank's, which enters the sum.",
        ),
        Mistake(_dealt_out, "Rank r owns a block of consecutive ids; yours are dealt out to the ranks one by one."),
        Mistake(
            lambda ranks: _embedding(ranks, summed=False),
            "These are this rank's rows only: the tokens of other ranks are still zeros.",
        ),
    ],
    idea="For each token exactly one rank has something to add to the sum. What do the others add?",
    hint="Rank r owns ids [r n, (r+1) n). Look up id - r n where it is owned, zeros elsewhere, then g. The table "
    "itself never travels.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ cross entropy


def _drive_loss(exercise: Any, logits: Any, target: Any, dloss: Any, tp: Any) -> dict[str, Any]:
    logits.requires_grad_()
    loss = exercise.cross_entropy(logits, target, tp)
    if loss.shape == dloss.shape:  # of another shape there is nothing to go back from; the loss says so
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


def _one_on_every_rank(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """The target's local index clamped into this rank's words, and one subtracted there on each rank."""
    right, target, n = _cross_entropy(ranks), ranks[0]["target"], ranks[0]["logits"].shape[-1]
    out = []
    for rank, (r, one) in enumerate(zip(ranks, right, strict=True)):
        local = target - rank * n
        foreign = (local < 0) | (local >= n)
        at = local.masked_fill(foreign, 0).unsqueeze(-1)
        less = -(foreign * r["dloss"]).unsqueeze(-1).to(one["dz"].dtype)
        out.append({**one, "dz": one["dz"].scatter_add(-1, at, less)})
    return out


def _not_the_target(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    z = torch.cat([r["logits"] for r in ranks], -1)
    dz = z.softmax(-1) * ranks[0]["dloss"].unsqueeze(-1)
    parts = dz.chunk(len(ranks), -1)
    return [{"loss": a["loss"], "dz": p} for a, p in zip(_cross_entropy(ranks), parts, strict=True)]


def _logits(scale: float = 1.0, t: int = 0) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        size, n, (s, b) = t or draw.integer(2, 4), draw.integer(40, 60), draw.shape(2, 3, 6)
        target, dloss = _with_borders(draw, size, n, s, b), draw.tensor(s, b)
        parts = [scale * draw.tensor(s, b, n) for _ in range(size)]
        return [{"logits": z, "target": target.clone(), "dloss": dloss.clone()} for z in parts]

    return inputs


def _two_words() -> Inputs:
    """One token, logits 0 and ln 3; its target, the second word, has probability 3/4; a gradient of 10 arrives."""
    both = [torch.zeros(1, 1, 1), torch.full((1, 1, 1), 3.0).log()]
    return [
        {"logits": z, "target": torch.ones(1, 1, dtype=torch.long), "dloss": torch.full((1, 1), 10.0)} for z in both
    ]


def _few_numbers(inputs: Inputs) -> float:
    """Three fp32 numbers a token of every rank, as gathering them moves; the logits would be forty a rank."""
    return 4 * 3 * len(inputs) * inputs[0]["target"].numel()


LOSS = Exercise(
    "cross_entropy",
    reference=_cross_entropy,
    drive=_drive_loss,
    axis="tp",
    dtypes=(torch.float32,),  # the loss is computed in float32, whatever the logits are
    cases=[
        Case("one word a rank, probabilities 1/4 and 3/4, target 1, dloss 10; then logits in the hundreds",
             _two_words(), fixed=[_logits(300.0, t=2)]),
        Case("loss and gradient, 3 ranks", _logits(t=3), points=2, hidden=True),
        Case(
            "right numbers; three numbers a token travel, never the logits", _logits(), points=2, hidden=True,
            accept=[at_most("the bound, three numbers a token of every rank,", _few_numbers)],
        ),
    ],
    mistakes=[
        Mistake(
            _by_parts(local_softmax=False),
            "exp() of large logits overflows: the maximum is not subtracted.",
        ),
        Mistake(
            _by_parts(local_softmax=True),
            "Your softmax is normalised over this rank's words alone.",
        ),
        Mistake(
            _by_parts(local_softmax=False, global_max=False),
            "Each rank subtracted its own maximum: the terms of the sum are on different scales.",
        ),
        Mistake(_upstream_lost, "The loss is right, dz is not: the gradient that arrives is lost."),
        Mistake(_one_on_every_rank, "The loss is right, dz is not: every rank subtracts one at a target, also where it "
                "is not its own word."),
        Mistake(_not_the_target, "The loss is right, dz is not: this is softmax alone, without the target."),
        Mistake(
            lambda ranks: [{"loss": one["loss"], "dz": ANYTHING} for one in _cross_entropy(ranks)],
            "The loss is right, the gradient dz is not: look at the backward pass alone.",
        ),
        Mistake(
            lambda ranks: [{"loss": ANYTHING, "dz": one["dz"]} for one in _cross_entropy(ranks)],
            "The gradient dz is right, the loss is not.",
        ),
    ],
    idea="Which three numbers of a token need all ranks, and what of the gradient needs no other rank?",
    hint="max over ranks of the local max; subtract; sum over ranks of exp(z).sum; sum over ranks of the target's "
    "logit, zero where it is not owned; log(sum) - target. Three numbers a token travel forward, none backward. dz is "
    "softmax minus one at the target, the one only on the rank that owns it, times the gradient that arrives.",
)  # fmt: skip
