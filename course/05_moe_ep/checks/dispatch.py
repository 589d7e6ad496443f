"""Lab 05: tokens as rows, rows to the ranks of their experts and back, and gradients of experts.

On ranks the references see the inputs of all; rank r of P holds the experts [r E/P, (r + 1) E/P).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import at_most, only
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

from .routing import top

Inputs = list[dict[str, Any]]

# -------------------------------------------------------------------------------------------------- permutation


def _drive_permute(exercise: Any, tokens: Any, probs: Any, map: Any, y: Any) -> dict[str, Any]:
    tokens.requires_grad_()
    rows, weights, source = exercise.permute(tokens, probs, map)
    (rows * y).sum().backward()
    back = exercise.unpermute(y, source, len(tokens))
    return {"rows": rows.detach(), "weights": weights, "source": source, "back": back, "gradient": tokens.grad}


def _permuted(
    tokens: torch.Tensor, probs: torch.Tensor, map: torch.Tensor, y: torch.Tensor, *, by: str = "expert",
    weights_by: str = "", back: str = "sum",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """`by`: what the rows are sorted by; `weights_by`: the same of their weights; `back`: what is done on the way."""
    pairs = {
        "expert": [(t, e) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]],
        "token": [(t, e) for t in range(len(map)) for e in range(map.shape[1]) if map[t, e]],
    }
    source = torch.tensor([t for t, _ in pairs[by]], dtype=torch.int64)
    weights = torch.stack([probs[t, e] for t, e in pairs[weights_by or by]]) if len(source) else probs.new_zeros(0)
    total = torch.zeros_like(tokens)
    for row, t in zip(y, source.tolist(), strict=True):
        total[t] = total[t] + row if back != "last" else row
    grad = torch.zeros_like(tokens).index_add(0, source, y)
    if back == "mean":
        total = total / map.sum(1, keepdim=True).clamp_min(1)
    return {"rows": tokens[source], "weights": weights, "source": source, "back": total, "gradient": grad}


def _some_map(draw: Draw, k: int = 2, quiet: bool = False) -> dict[str, Any]:
    t, e, h = draw.integer(4, 9), draw.integer(3, 6), draw.integer(2, 5)
    scores = draw.tensor(t, e)
    chosen = top(scores, k or e)
    if quiet:  # an expert that nobody wants, and a token that was dropped everywhere
        chosen[:, draw.integer(0, e - 1)] = False
        chosen[draw.integer(0, t - 1)] = False
    probs = draw.tensor(t, e).abs() * chosen
    return {"tokens": draw.tensor(t, h), "probs": probs, "map": chosen, "y": draw.tensor(int(chosen.sum()), h)}


def _every_expert(draw: Draw) -> dict[str, Any]:
    return _some_map(draw, 0)


def _quiet(draw: Draw) -> dict[str, Any]:
    return _some_map(draw, quiet=True)


_SMALL = {
    "tokens": torch.tensor([[1.0], [2.0], [3.0]]),
    "probs": torch.tensor([[0.25, 0.75], [0.0, 1.0], [1.0, 0.0]]),
    "map": torch.tensor([[True, True], [False, True], [True, False]]),
    "y": torch.tensor([[10.0], [20.0], [30.0], [40.0]]),
}

PERMUTE = Exercise(
    "permute",
    reference=_permuted,
    drive=_drive_permute,
    cases=[
        Case("three tokens, two experts", _SMALL),
        Case("other sizes", _some_map, points=2, hidden=True),
        Case("every token to every expert", _every_expert, hidden=True),
        Case("an expert without tokens, a token without experts", _quiet, hidden=True),
    ],
    mistakes=[
        Mistake(lambda **i: _permuted(**i, by="token"), "The rows are sorted by token. What goes to one expert must "
                "be contiguous: sort by expert, then by token."),
        Mistake(lambda **i: _permuted(**i, weights_by="token"), "The weights stand in the order of the tokens, the "
                "rows in that of the experts: each row gets another row's weight."),
        Mistake(lambda **i: _permuted(**i, back="last"), "A token has several rows: they are *added* to it. An "
                "assignment keeps the last."),
        Mistake(lambda **i: _permuted(**i, back="mean"), "The rows are added, not averaged: their weights sum to 1 "
                "already."),
    ],
    hint="map.T.nonzero() lists the pairs (expert, token) in the right order. rows = tokens[source]; "
    "weights = probs.T[map.T]; back: index_add into zeros.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ all-to-all


def _drive_dispatch(exercise: Any, rows: Any, counts: Any) -> dict[str, Any]:
    from minimegatron.comm.mesh import Axis

    ep = Axis.world("ep")
    mine, blocks = exercise.dispatch(rows, counts, ep)
    return {"mine": mine, "blocks": blocks, "back": exercise.combine(3 * mine, blocks, counts, ep)}


def _pieces(ranks: Inputs) -> list[list[list[torch.Tensor]]]:
    """[receiver][sender][expert of the receiver] -> rows."""
    world = len(ranks)
    cut = [list(r["rows"].split(r["counts"].tolist())) for r in ranks]
    local = len(cut[0]) // world
    return [[cut[i][r * local : (r + 1) * local] for i in range(world)] for r in range(world)]


def _dispatched(ranks: Inputs, *, grouped: bool = True, home: bool = True, flat: bool = False) -> list[dict[str, Any]]:
    """`grouped`: by expert; `home`: the way back undoes the grouping; `flat`: blocks turned round."""
    found = []
    for r, of in enumerate(_pieces(ranks)):
        by_expert = [rows for expert in zip(*of, strict=True) for rows in expert]
        by_sender = [rows for sender in of for rows in sender]
        blocks = torch.tensor([[len(rows) for rows in sender] for sender in of])
        mine = torch.cat(by_expert if grouped else by_sender)
        found.append({"mine": mine, "blocks": blocks.T if flat else blocks, "back": 3 * ranks[r]["rows"]})
    return found if home else _never_ungrouped(ranks, found)


def _never_ungrouped(ranks: Inputs, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows go home in the order of the experts, cut as if in that of the senders."""
    sent = [one["mine"].split(one["blocks"].sum(1).tolist()) for one in found]
    return [{**one, "back": 3 * torch.cat([sent[r][i] for r in range(len(ranks))])} for i, one in enumerate(found)]


def _some_rows(draw: Draw, world: int = 0, local: int = 0, most: int = 4) -> Inputs:
    world, local = world or draw.integer(2, 4), local or draw.integer(2, 3)
    h, ranks = draw.integer(2, 4), []
    for _ in range(world):
        counts = torch.tensor([draw.integer(0, most) for _ in range(world * local)])
        counts[0] = most
        ranks.append({"rows": draw.tensor(int(counts.sum()), h), "counts": counts})
    return ranks


def _two_ranks(draw: Draw) -> Inputs:
    return _some_rows(draw, 2, 2)


def _an_idle_rank(draw: Draw) -> Inputs:
    """Nobody wants the experts of rank 1, and rank 0 has no tokens at all."""
    ranks, local = _some_rows(draw, 3, 2), 2
    for r, one in enumerate(ranks):
        one["counts"][local : 2 * local] = 0
        if r == 0:
            one["counts"][:] = 0
        one["rows"] = draw.tensor(int(one["counts"].sum()), 3)
    return ranks


def _many_rows(draw: Draw) -> Inputs:
    return _some_rows(draw, 4, 2, 24)


def _rows_and_counts(ranks: Inputs) -> int:
    """Rows of the busiest rank, there and back, and a table of counts."""
    arrive = [sum(len(rows) for sender in of for rows in sender) for of in _pieces(ranks)]
    most = max(max(arrive), *(len(r["rows"]) for r in ranks))
    return int(2 * most * ranks[0]["rows"].shape[1] * 4 + 8 * len(ranks) * len(ranks[0]["counts"]))


DISPATCH = Exercise(
    "dispatch",
    reference=_dispatched,
    drive=_drive_dispatch,
    cases=[
        Case("2 ranks, 4 experts", _two_ranks, hidden=True),
        Case("up to 4 ranks", _some_rows, points=2, hidden=True),
        Case("a rank that gets nothing, one that has nothing", _an_idle_rank, hidden=True),
        Case("rows travel to their expert and back, and nowhere else", _many_rows, points=2, hidden=True, accept=[
            only("all_to_all", "all_gather", "send", "recv"),
            at_most("the busiest rank's rows, there and back, and the counts", _rows_and_counts,
                    "all_to_all", "all_gather", "send")]),
    ],
    mistakes=[
        Mistake(lambda ranks: _dispatched(ranks, grouped=False), "The rows arrive by sender. An expert wants its own "
                "in one piece: sort the blocks by expert, then by sender."),
        Mistake(lambda ranks: _dispatched(ranks, home=False), "`y` is sorted by expert; before it travels its blocks "
                "must be back in the order in which they came, by sender."),
        Mistake(lambda ranks: _dispatched(ranks, flat=True), "blocks[i, e]: the rows that rank i sends to expert e of "
                "this rank, [P, E/P]."),
    ],
    hint="Send counts first: an all-to-all of [P, E/P], or an all-gather, gives blocks. Rows: input splits are "
    "counts.view(P, -1).sum(1), output splits blocks.sum(1). What arrives is a list of P * E/P blocks: take e slowest, "
    "i fastest. The way back is the mirror image, splits exchanged.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------- gradients of experts


def _drive_finish(exercise: Any, dense: Any, expert: Any, tokens: int, ep: int) -> dict[str, Any]:
    import datetime

    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    dp, edp = Axis.world("dp"), None
    for first in range(ep):
        ranks = dp.ranks[first::ep]
        group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=30)) if len(ranks) > 1 else None
        if dp.rank in ranks:
            edp = Axis("edp", ranks, ranks.index(dp.rank), group)
    dense, expert = exercise.finish(dense, expert, tokens, dp, edp)
    return {"dense": dense, "expert": expert}


def _finished(
    ranks: Inputs, *, expert_over: str = "edp", expert_by: str = "all", dense_by: str = "all"
) -> list[dict[str, torch.Tensor]]:
    """`expert_over`: the ranks that are summed; `..._by`: what the sum is divided by."""
    ep, world = ranks[0]["ep"], len(ranks)
    every = sum(r["tokens"] for r in ranks)
    found = []
    for r in range(world):
        edp = [one for i, one in enumerate(ranks) if i % ep == r % ep]
        own = {"edp": edp, "dp": ranks, "own": [ranks[r]]}[expert_over]
        by = {
            "all": every, "edp": sum(one["tokens"] for one in edp), "mean": every * len(edp), "ep": every * ep,
            "nothing": 1, "dp": every * world,
        }  # fmt: skip
        means = torch.stack([one["dense"] / one["tokens"] for one in ranks]).mean(0)
        total = torch.stack([one["dense"] for one in ranks]).sum(0)
        dense = {"all": total / every, "means": means, "nothing": total}[dense_by]
        found.append({"dense": dense, "expert": torch.stack([one["expert"] for one in own]).sum(0) / by[expert_by]})
    return found


def _gradients(draw: Draw, world: int = 4, ep: int = 2) -> Inputs:
    n, m = draw.integer(2, 6), draw.integer(2, 6)
    return [
        {"dense": draw.tensor(n), "expert": draw.tensor(m), "tokens": 5 + 3 * r + draw.integer(0, 2), "ep": ep}
        for r in range(world)
    ]


def _all_ep(draw: Draw) -> Inputs:
    return _gradients(draw, 3, 3)


def _no_ep(draw: Draw) -> Inputs:
    return _gradients(draw, 2, 1)


def _expert(**how: str) -> Callable[[Inputs], Any]:
    return lambda ranks: _finished(ranks, **how)


def _no_more(answer: Answer) -> str | None:
    """The two gradients and the count, each once."""
    for rank, one in enumerate(answer.evidence):
        if one.count("all_reduce") > 3:
            return f"rank {rank} makes {one.count('all_reduce')} all-reduces; three are enough"
    return None


FINISH = Exercise(
    "finish",
    reference=_finished,
    drive=_drive_finish,
    cases=[
        Case("4 ranks, ep 2", _gradients, points=2, hidden=True),
        Case("3 ranks, ep 3: every expert lives once", _all_ep, hidden=True),
        Case("2 ranks, ep 1", _no_ep, hidden=True),
        Case("three sums, no more", _gradients, hidden=True, accept=[only("all_reduce"), _no_more]),
    ],
    mistakes=[
        Mistake(_expert(expert_by="edp"), "The experts are divided by the tokens of edp alone. Tokens of *all* ranks "
                "reached them, through the all-to-all: divide by the tokens of the whole batch."),
        *(Mistake(_expert(expert_by=by), "The experts are divided once too often, by a number of ranks. Sums are "
                  "divided by the number of tokens and by nothing else.") for by in ("mean", "ep", "dp")),
        Mistake(_expert(expert_over="dp"), "Ranks of one ep group hold *different* experts. Sum an expert over the "
                "ranks that hold a copy of it: edp."),
        Mistake(_expert(expert_over="own"), "Ranks of edp hold the same experts and saw other tokens: their gradients "
                "are summed."),
        Mistake(_expert(dense_by="means"), "A mean of means: ranks with few tokens count too much. Sum the gradients, "
                "sum the tokens, divide once."),
        Mistake(_expert(dense_by="nothing", expert_by="nothing"), "The sums are not divided yet: by the tokens of all "
                "ranks."),
    ],
    hint="N = tokens summed over dp. dense: sum over dp, divided by N. expert: sum over edp, divided by the same N.",
)  # fmt: skip
