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

from labkit.checks import at_most, sends
from labkit.exercises import Case, Draw, Exercise

from .linear import in_whole_numbers

Inputs = list[dict[str, Any]]

# ---------------------------------------------------------------------------------------------------- embedding


def _drive_embedding(exercise: Any, ids: Any, weight: Any, dy: Any, tp: Any) -> dict[str, Any]:
    weight.requires_grad_()
    y = exercise.embedding(ids, weight, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
        y.backward(dy)
    return {"y": y.detach(), "dw": weight.grad}


def _embedding(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    ids, dy = ranks[0]["ids"], ranks[0]["dy"]
    table = torch.cat([r["weight"] for r in ranks]).requires_grad_()
    y = table[ids]
    y.backward(dy)
    assert table.grad is not None, "the table has a gradient"
    return [{"y": y.detach(), "dw": dw} for dw in table.grad.chunk(len(ranks))]


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


_NO_ROW = "A row is looked up that this rank does not have: its table begins with the row of id r n."

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
            accept=[sends("all_reduce", times=1, at_most=("s*b*h elements", lambda i: i[0]["dy"].nbytes))],
        ),
    ],
    errors={
        "does not require grad": "The rows that you return do not lead back to the table: what is detached, or filled "
        "in without autograd, has no gradient.",
        "out of bounds for dimension 0": _NO_ROW,
        "index out of range in self": _NO_ROW,
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


def _logits(scale: float = 1.0, t: int = 0) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        size, n, (s, b) = t or draw.integer(2, 4), draw.integer(40, 60), draw.shape(2, 3, 6)
        target, dloss = _with_borders(draw, size, n, s, b), draw.tensor(s, b)
        parts = [scale * draw.tensor(s, b, n) for _ in range(size)]
        return [{"logits": z, "target": target.clone(), "dloss": dloss.clone()} for z in parts]

    return inputs


def _left_out(draw: Draw) -> Inputs:
    """Logits on 3 ranks, a quarter of them -inf; for each token so are all logits of the rank behind its target's."""
    ranks = _logits(t=3)(draw)
    (s, b), n = ranks[0]["target"].shape, ranks[0]["logits"].shape[-1]
    for i in range(s):
        for j in range(b):
            owner, word = divmod(int(ranks[0]["target"][i, j]), n)
            for r, rank in enumerate(ranks):
                out = torch.tensor([draw.integer(0, 3) == 0 for _ in range(n)])
                if r == owner:
                    out[word] = False
                rank["logits"][i, j, out if r != (owner + 1) % 3 else slice(None)] = -torch.inf
    return ranks


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
        Case("loss and gradient, 3 ranks; then some logits -inf", _logits(t=3), points=2, hidden=True,
             fixed=[_left_out]),
        Case(
            "right numbers; three numbers a token travel, never the logits", _logits(), points=2, hidden=True,
            accept=[at_most("the bound, three numbers a token of every rank,", _few_numbers)],
        ),
    ],
    idea="Which three numbers of a token need all ranks, and what of the gradient needs no other rank?",
    hint="max over ranks of the local max; subtract; sum over ranks of exp(z).sum; sum over ranks of the target's "
    "logit, zero where it is not owned; log(sum) - target. Three numbers a token travel forward, none backward. dz is "
    "softmax minus one at the target, the one only on the rank that owns it, times the gradient that arrives.",
)  # fmt: skip
