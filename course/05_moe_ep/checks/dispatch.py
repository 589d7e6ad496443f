"""Lab 05: rows sent to the ranks of their experts, and back.

The references get the inputs of all ranks; rank r of P holds the experts [r E/P, (r + 1) E/P).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from labkit.checks import sends
from labkit.exercises import Case, Draw, Exercise

Inputs = list[dict[str, Any]]
Layer = tuple[torch.Tensor, ...]  # rows, counts


def _drive_dispatch(exercise: Any, rows: Any, counts: Any, experts: Any, later: Any, ep: Any) -> dict[str, Any]:
    """Run the learner's dispatch.

    Args:
        experts: the factors with which experts multiply a row.
        later: rows and counts of another layer, dispatched before the first rows return.
    """
    counts, later = counts.contiguous(), [one.contiguous() for one in later]  # counts are, as a sum is
    mine, blocks = exercise.dispatch(rows, counts, ep)
    found = {"dispatch's rows": mine, "dispatch's blocks": blocks}
    if later:
        more, cut = exercise.dispatch(*later, ep)
        found["combine's result, of another layer"] = exercise.combine(experts * more, cut, later[1], ep)
    return {**found, "combine's result": exercise.combine(experts * mine, blocks, counts, ep)}


def _pieces(layer: Sequence[Layer]) -> list[list[list[torch.Tensor]]]:
    """The rows as [receiver][sender][expert of the receiver]."""
    cut, world = [list(rows.split(counts.tolist())) for rows, counts in layer], len(layer)
    local = len(cut[0]) // world
    return [[cut[i][r * local : (r + 1) * local] for i in range(world)] for r in range(world)]


def _dispatched(ranks: Inputs) -> list[dict[str, Any]]:
    factors = [one["experts"] for one in ranks]
    found = _journey([(one["rows"], one["counts"]) for one in ranks], factors)
    if ranks[0]["later"]:
        more = _journey([tuple(one["later"]) for one in ranks], factors)
        for one, other in zip(found, more, strict=True):
            one["combine's result, of another layer"] = other["combine's result"]
    return found


def _journey(layer: Sequence[Layer], factors: list[float]) -> list[dict[str, Any]]:
    """The rows of one layer at the experts and after their return."""
    found, local = [], len(layer[0][1]) // len(layer)
    for of, (rows, counts) in zip(_pieces(layer), layer, strict=True):
        times = torch.tensor(factors, dtype=rows.dtype).repeat_interleave(local).repeat_interleave(counts)
        found.append({
            "dispatch's rows": torch.cat([sender[e] for e in range(local) for sender in of]),
            "dispatch's blocks": torch.tensor([[len(piece) for piece in sender] for sender in of]),
            "combine's result": times[:, None] * rows,
        })  # fmt: skip
    return found


def _on_ranks(draw: Draw, counts: list[torch.Tensor], h: int, later: list[torch.Tensor] | None = None) -> Inputs:
    """Inputs in which each rank's experts multiply by another number, so that a guess of what returns is wrong."""
    ranks = []
    for r, n in enumerate(counts):
        more = [draw.tensor(int(later[r].sum()), h), later[r]] if later else []
        ranks.append({"rows": draw.tensor(int(n.sum()), h), "counts": n, "experts": 2.0 + r, "later": more})
    return ranks


def _some_counts(draw: Draw, world: int, local: int, most: int) -> list[torch.Tensor]:
    """Draw different counts for each rank; all ranks send rows to the first expert."""
    counts = [torch.tensor(draw.sizes(world * local, 0, most)) for _ in range(world)]
    for one in counts:
        one[0] = most
    return counts


def _some_rows(draw: Draw, world: int = 0, local: int = 0, most: int = 4, h: int = 0) -> Inputs:
    world, local = world or draw.integer(2, 4), local or draw.integer(1, 3)
    return _on_ranks(draw, _some_counts(draw, world, local, most), h or draw.integer(2, 4))


def _two_layers(draw: Draw) -> Inputs:
    """Three ranks with an expert each, rows of one number, and another layer with other counts."""
    return _on_ranks(draw, _some_counts(draw, 3, 1, 4), 1, _some_counts(draw, 3, 1, 3))


def _an_idle_rank(draw: Draw, without: int = 0) -> Inputs:
    """No token goes to the experts of rank 1, and the rank `without` has no tokens."""
    counts = _some_counts(draw, 3, 2, 4)
    for one in counts:
        one[2:4] = 0
    counts[without][:] = 0
    return _on_ranks(draw, counts, 3)


_many_rows = partial(_some_rows, world=4, local=2, most=24, h=32)


def _one_large_block(draw: Draw) -> Inputs:
    """Draw few rows, but for those of one rank for one expert: blocks of equal size would be mostly padding."""
    counts = _some_counts(draw, 4, 2, 3)
    counts[1][4] = 60
    return _on_ranks(draw, counts, 32)


def _rows_and_counts(ranks: Inputs) -> int:
    """The bytes that are allowed: rows of the busiest rank, in both directions, and 4 KiB for the counts."""
    arrive = [sum(len(rows) for sender in of for rows in sender)
              for of in _pieces([(one["rows"], one["counts"]) for one in ranks])]  # fmt: skip
    most = max(max(arrive), *(len(r["rows"]) for r in ranks))
    return int(2 * most * ranks[0]["rows"].shape[1] * ranks[0]["rows"].itemsize + 4096)


# The lab's picture: row b3, token b for expert 3, is [2, 3]; rank 0's experts multiply by 1, rank 1's by 10.
_PICTURE = [
    {"rows": torch.tensor([[1.0, 1], [2, 1], [3, 1], [1, 2], [2, 3], [3, 3]]), "counts": torch.tensor([0, 3, 1, 2]),
     "experts": 1.0, "later": []},
    {"rows": torch.tensor([[4.0, 0], [5, 0], [6, 0], [4, 1], [6, 1], [5, 2]]), "counts": torch.tensor([3, 2, 1, 0]),
     "experts": 10.0, "later": []},
]  # fmt: skip

ANY = (
    "all_to_all", "all_gather", "all_reduce", "reduce_scatter", "broadcast", "gather", "scatter", "reduce", "barrier",
    "send", "recv",
)  # fmt: skip

_STAYS_AWAY = {
    words: "Here some ranks make a call and others do not. A rank without rows takes part, too: a collective is a call "
    "that all ranks of the group make."
    for words in ("has returned", "no longer meet")
}


DISPATCH = Exercise(
    "dispatch",
    reference=_dispatched,
    drive=_drive_dispatch,
    axis="ep",
    cases=[
        Case("the picture: row b3 is [2, 3]; rank 1's experts multiply by 10", _PICTURE),
        Case("up to 4 ranks", _some_rows, points=2, hidden=True, fixed=[_two_layers], errors=_STAYS_AWAY),
        Case("a rank that gets nothing, one that has nothing", _an_idle_rank, hidden=True, fixed=[
            partial(_an_idle_rank, without=1)],
             errors={**_STAYS_AWAY, "nothing goes on any more": _STAYS_AWAY["has returned"]}),
        Case("rows travel to their expert and back, and nowhere else", _many_rows, points=2, hidden=True, fixed=[
            _one_large_block], accept=[
            sends(*ANY, at_most=("the busiest rank's rows, there and back, and the counts", _rows_and_counts))]),
    ],
    errors={
        words: "The splits do not fit the rows: input splits are the rows for each rank, output splits those from each."
        for words in ("Split sizes", "split sizes", "which expects")
    },
    idea="Follow b3 through the picture: at each line ask how many rows come before it.",
    hint="Send counts first: an all-to-all of [P, E/P], or an all-gather, gives blocks. Rows: input splits are "
    "counts.view(P, -1).sum(1), output splits blocks.sum(1). What arrives is a list of P * E/P blocks: take e slowest, "
    "i fastest. The way back is the mirror image, splits exchanged.",
)  # fmt: skip
