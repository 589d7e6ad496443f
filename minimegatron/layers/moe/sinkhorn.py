"""Sinkhorn routing: experts are dealt out evenly, instead of taught to be asked for evenly.

The problem in a sentence: each token takes the experts it likes best, and all like the same; but who goes where is an
assignment problem, and a nearly optimal assignment with equal loads is a few sweeps over a matrix away.

    C = exp(logits)  [T, E]     find r [T], c [E] so that S = diag(r) C diag(c) has
                                rows that sum to 1/T: every token is dealt out once
                                columns that sum to 1/E: every expert gets as much as any other
    repeat  r = 1 / (T C c);  c = 1 / (E C^T r)      until c moves by less than `tol` on average

S is the C that is nearest to such a table (in relative entropy). A token goes to the k largest of its row of S. This is
a choice, so it has no gradient; the weights come from the logits: a sigmoid for k = 1, else a softmax over all experts.

S balances amounts and a token takes whole experts, so loads are even only nearly. It is a property of a batch: an
evaluation, which may have one token, takes the k best by the weights.

| what travels in a sweep | axis    | bytes |
|-------------------------|---------|-------|
| the sums over columns   | `tp_cp` | 8 E   |

A microbatch is one assignment, whatever shares its tokens, so the routing does not depend on the layout. *Difference
from Megatron-LM*, where each rank deals out its own tokens: the same for tp = cp = 1.

The host looks whether it is done after 4, 8, 16 ... sweeps: to look after each is to wait for the device after each.
What had stopped moving by then has been left as it was, so the result is that of a look after every sweep.

Every row of C is divided by its largest element first. r takes that up, S stays as it is, and nothing overflows.

Sinkhorn & Knopp 1967; Clark et al. 2022 (arXiv 2202.01169), S-BASE. Megatron-LM: `sinkhorn` in
`transformer/moe/moe_utils.py`.
"""

from __future__ import annotations

import torch

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.layers.recompute import numbers_of

TOLERANCE = 1e-4
SWEEPS = 1024  # far more than it takes; a row of NaN ends it at once
LOOK = 4
TINY = 1e-8


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, axis: Axis, tol: float = TOLERANCE) -> torch.Tensor:
    """The balanced table S of the tokens of all ranks of the axis, which have equally many.

    Args:
        logits: [T, E] of this rank.
        axis: who shares the microbatch.
        tol: mean change of an expert's factor at which the sweeps end.

    Returns:
        This rank's rows [T, E], in fp64.
    """
    tokens, experts = len(logits) * axis.size, logits.shape[1]
    wide = logits.double()
    c = (wide - wide.amax(1, keepdim=True)).exp()
    columns, rows = c.new_ones(experts), c.new_empty(len(c))
    moving = torch.ones((), dtype=torch.bool, device=c.device)
    for sweep in range(1, SWEEPS + 1):
        new_rows = 1 / (tokens * ((c @ columns) + TINY))
        new = 1 / (experts * (all_reduce(new_rows @ c, axis) + TINY))
        far = (new - columns).abs().mean() > tol
        rows, columns = torch.where(moving, new_rows, rows), torch.where(moving, new, columns)
        moving = moving & far
        if sweep >= LOOK and sweep & (sweep - 1) == 0 and not numbers_of(moving, list):
            break
    return rows[:, None] * c * columns


def assign(logits: torch.Tensor, k: int, axis: Axis | None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> (weights [T, k], numbers of the experts [T, k]).

    Args:
        logits: of this rank's tokens.
        k: experts of a token.
        axis: who shares the microbatch; None where tokens choose for themselves (evaluation).
    """
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    by = scores.detach() if axis is None else sinkhorn(logits, axis)
    chosen = by.topk(k, -1).indices
    return scores.gather(1, chosen), chosen
