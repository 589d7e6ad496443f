"""Lab 02, the vocabulary over tp: rows of a cut table, and a loss whose logits stay on their ranks.

Rank r of t owns the ids [r n, (r + 1) n). Beside the numbers the judge checks that neither the table nor the logits are
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import at_most, count, only
from labkit.compare import ANYTHING
from labkit.exercises import Case, Draw, Exercise, Mistake

from .linear import in_whole_numbers

Inputs = list[dict[str, Any]]

# ---------------------------------------------------------------------------------------------------- embedding


def _drive_embedding(exercise: Any, ids: Any, weight: Any, dy: Any, tp: Any) -> dict[str, Any]:
    weight.requires_grad_()
    y = exercise.embedding(ids, weight, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
        y.backward(dy)
    return {"y": y.detach(), "dw": weight.grad}


def _embedding(
    ranks: Inputs, foreign: Callable[[torch.Tensor, int], torch.Tensor] | None = None
) -> list[dict[str, torch.Tensor]]:
    """The right embedding; `foreign` replaces the zeros that stand for an id of another rank by a row."""
    parts = _own_rows(ranks, foreign)
    total = torch.stack([p["y"] for p in parts]).sum(0)
    return [{**p, "y": total} for p in parts]


def _own_rows(
    ranks: Inputs, foreign: Callable[[torch.Tensor, int], torch.Tensor] | None = None
) -> list[dict[str, torch.Tensor]]:
    parts, n = [], ranks[0]["weight"].shape[0]
    for rank, r in enumerate(ranks):
        weight = r["weight"].clone().requires_grad_()
        local = r["ids"] - rank * n
        own = (local >= 0) & (local < n)
        at = torch.where(own, local, (foreign or _nearest)(local, n))
        rows = F.embedding(at, weight)
        rows = rows if foreign else rows * own.unsqueeze(-1)
        rows.backward(r["dy"])
        assert weight.grad is not None, "the table has a gradient"
        parts.append({"y": rows.detach(), "dw": weight.grad})
    return parts


def _nearest(local: torch.Tensor, n: int) -> torch.Tensor:
    return local.clamp(0, n - 1)


def _largest(ranks: Inputs) -> torch.Tensor:
    return torch.stack([one["y"] for one in _own_rows(ranks)]).amax(0)


def _added(ranks: Inputs) -> torch.Tensor:
    return torch.stack([one["dw"] for one in _own_rows(ranks)]).sum(0)


def _dealt_out(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistaken answer: id i is on rank i modulo t, in row i // t."""
    t, n = len(ranks), ranks[0]["weight"].shape[0]
    return _embedding([{**r, "ids": r["ids"] % t * n + r["ids"] // t} for r in ranks])


def _with_borders(draw: Draw, t: int, n: int, s: int, b: int) -> torch.Tensor:
    """Draw ids [s, b] of t * n words: the first and last of each rank, others, and the last row of the table once
    more."""
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
        *(
            Mistake(
                lambda ranks, foreign=foreign: _embedding(ranks, foreign),
                "Ids of other ranks must give zeros here; yours give some row of this rank's, which enters the sum.",
            )
            for foreign in (_nearest, lambda local, n: local % n, lambda local, n: 0 * local)
        ),
        Mistake(_dealt_out, "Rank r owns a block of consecutive ids; yours are dealt out to the ranks one by one."),
        *(
            Mistake(
                lambda ranks, gradient=gradient: [{**one, **gradient} for one in _own_rows(ranks)],
                "These are this rank's rows only: the tokens of other ranks are still zeros.",
            )
            for gradient in ({}, {"dw": ANYTHING})
        ),
        Mistake(
            lambda ranks: [{name: part / len(ranks) for name, part in one.items()} for one in _embedding(ranks)],
            "This is the mean over ranks: one rank has the row, the others add zeros, and nothing is divided.",
        ),
        Mistake(
            lambda ranks: [{**one, "y": _largest(ranks)} for one in _embedding(ranks)],
            "You took the largest over ranks: beside a negative number of the row this is another rank's zero.",
        ),
        Mistake(
            lambda ranks: [{**one, "dw": len(ranks) * one["dw"]} for one in _embedding(ranks)],
            "The gradient is summed once too often: it is the same on every rank already.",
        ),
        Mistake(
            lambda ranks: [{**one, "dw": _added(ranks)} for one in _embedding(ranks)],
            "The gradient of the table is summed over ranks: each rank has other rows, and their gradient is complete.",
        ),
        Mistake(
            lambda ranks: [{**one, "dw": ANYTHING} for one in _embedding(ranks)],
            "y is right, the gradient of the table is not: follow it back through what you did with the rows.",
        ),
    ],
    errors={
        "does not require grad": "The rows that you return do not lead back to the table: what is detached, or filled "
        "in without autograd, has no gradient.",
    }
    | {
        word: "You look up an id as it is. Row 0 of this rank's table belongs to id r n."
        for word in ("is out of bounds for dimension 0", "index out of range in self")
    },
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


def _nothing(highest: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(highest)


def _by_parts(
    local_softmax: bool = False, shift: Callable[[torch.Tensor], torch.Tensor] = _nothing
) -> Callable[[Inputs], list[dict[str, torch.Tensor]]]:
    """Return the answer of a loss whose softmax is normalised over the local vocabulary, or that subtracts another
    shift than the maximum.

    Args:
        shift: from the maxima of the ranks, [t, s, b, 1], to what each rank subtracts.
    """

    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        n, target, dloss = ranks[0]["logits"].shape[-1], ranks[0]["target"], ranks[0]["dloss"]
        shifts = shift(torch.stack([r["logits"].amax(-1, keepdim=True) for r in ranks]))
        zs = [r["logits"] - one for r, one in zip(ranks, shifts, strict=True)]
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


def _through_the_maximum(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistaken gradient: autograd goes back through the maximum. Its contribution is 0 over all ranks together, and
    not 0 on a single rank."""
    out = []
    for r, one in zip(ranks, _cross_entropy(ranks), strict=True):
        highest = (r["logits"] == r["logits"].amax(-1, keepdim=True)).to(one["dz"].dtype)
        passed = -one["dz"].sum(-1, keepdim=True)
        out.append({**one, "dz": one["dz"] + passed * highest / highest.sum(-1, keepdim=True)})
    return out


def _of_other_words(ranks: Inputs, every_rank: bool, at: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """A mistaken logit of the target: every rank adds one, also where the target is another rank's word; or only this
    rank does."""
    n, target, picked = ranks[0]["logits"].shape[-1], ranks[0]["target"], []
    z = torch.cat([r["logits"].double() for r in ranks], -1)
    highest = z.amax(-1)
    for rank, r in enumerate(ranks):
        local = target - rank * n
        own = (local >= 0) & (local < n)
        where = torch.where(own, local, at(local, n)).unsqueeze(-1)
        found = r["logits"].double().gather(-1, where).squeeze(-1) - highest
        picked.append(found if every_rank else found * own)
    hits = [torch.stack(picked).sum(0)] * len(ranks) if every_rank else picked
    partition = (z - highest.unsqueeze(-1)).exp().sum(-1).log()
    return [{**one, "loss": (partition - hit).float()} for one, hit in zip(_cross_entropy(ranks), hits, strict=True)]


def _of_its_rank(ranks: Inputs) -> list[dict[str, Any]]:
    """A mistaken answer: F.cross_entropy over the words of the rank that owns the target, and zeros on the other
    ranks."""
    n, target = ranks[0]["logits"].shape[-1], ranks[0]["target"]
    each = [
        F.cross_entropy(r["logits"].flatten(0, 1), (target % n).flatten(), reduction="none").view_as(target)
        * (target // n == rank)
        for rank, r in enumerate(ranks)
    ]
    return [{"loss": torch.stack(each).sum(0), "dz": ANYTHING} for _ in ranks]


def _gradients_added(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _cross_entropy(ranks)
    total = torch.stack([one["dz"] for one in right]).sum(0)
    return [{**one, "dz": total} for one in right]


def _upstream_lost(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _cross_entropy(ranks)
    dloss = ranks[0]["dloss"].unsqueeze(-1)
    return [{"loss": a["loss"], "dz": a["dz"] / dloss} for a in right]


def _one_on_every_rank(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistaken gradient: the target's local index is clamped into this rank's words, and one is subtracted there on
    each rank."""
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
    """Bytes of three fp32 numbers for each token and rank, as gathering them sends; the logits are about forty for each
    rank."""
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
            _by_parts(),
            "exp() of large logits overflows: the maximum is not subtracted.",
        ),
        Mistake(
            _of_its_rank,
            "Your softmax is normalised over this rank's words alone.",
        ),
        Mistake(
            _by_parts(local_softmax=True),
            "Your softmax is normalised over this rank's words alone.",
        ),
        Mistake(
            _by_parts(shift=lambda highest: highest),
            "Each rank subtracted its own maximum: the terms of the sum are on different scales.",
        ),
        Mistake(
            _by_parts(shift=lambda highest: highest.sum(0, keepdim=True).expand_as(highest)),
            "You added the ranks' maxima: the maximum over all words is the largest of them.",
        ),
        *(
            Mistake(
                lambda ranks, at=at: _of_other_words(ranks, True, at),
                "Every rank adds a logit for every target, also where the target is not its own word.",
            )
            for at in (lambda local, n: 0 * local, lambda local, n: local % n, lambda local, n: local.clamp(0, n - 1))
        ),
        Mistake(
            lambda ranks: _of_other_words(ranks, False, lambda local, n: 0 * local),
            "The logit of a target is on one rank, and the others miss it: it is not summed over ranks.",
        ),
        Mistake(_upstream_lost, "The loss is right, dz is not: the gradient that arrives is lost."),
        Mistake(_one_on_every_rank, "The loss is right, dz is not: every rank subtracts one at a target, also where it "
                "is not its own word."),
        Mistake(
            lambda ranks: [{**one, "dz": len(ranks) * one["dz"]} for one in _cross_entropy(ranks)],
            "The loss is right, dz is not: it is summed over ranks once too often. The gradient that arrives is the "
            "same on every rank already.",
        ),
        Mistake(
            _gradients_added,
            "The loss is right, dz is not: it is summed over ranks. Each rank's dz belongs to its own words.",
        ),
        Mistake(
            _through_the_maximum,
            "The loss is right, dz is not: autograd goes back through the maximum. It shifts all terms and has no "
            "part in the gradient.",
        ),
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
