"""Lab 01, what runs on ranks: a ring of sends, f and g, the loss's divisor. (Buckets that overlap: `buckets`.)

A reference gets the inputs of all ranks as a list, and returns one answer for each rank. The evidence says what was
sent, and when: the ring is judged by its bytes and its neighbours, f and g by the pass in which they communicate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import every_wait_follows, sends
from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------------- the ring


def _drive_ring(exercise: Any, x: Any, turned: bool = False) -> Any:
    """Run the learner's ring on x; with `turned` on a transpose with the same values, whose rows are not contiguous."""
    return exercise.ring_all_reduce(x.mT.contiguous().mT if turned else x)


def _sum_of_ranks(ranks: Inputs) -> list[torch.Tensor]:
    total = torch.stack([r["x"].double() for r in ranks]).sum(0).to(ranks[0]["x"].dtype)
    return [total] * len(ranks)


def _ring_bound(inputs: Inputs) -> float:
    n, x = len(inputs), inputs[0]["x"]
    return 2 * (n - 1) * math.ceil(x.numel() / n) * x.element_size()


def _nothing_is_rounded(answer: Answer) -> str | None:
    """Check that no rank sends too few bytes. A sum in float32 is too close to the right one to be told by its values,
    but it sends fewer bytes than any all-reduce in float64."""
    n, x = len(answer.inputs), answer.inputs[0]["x"]
    least, sent = 2 * (n - 1) * x.numel() * x.element_size(), sum(one.nbytes("send") for one in answer.evidence)
    return (
        f"{sent} bytes are sent, and all parts have {least}: is a message of another dtype?" if sent < least else None
    )


def _even(draw: Draw) -> Inputs:
    n, k = draw.integer(2, 4), draw.integer(1, 50)
    return [{"x": draw.tensor(n * k)} for _ in range(n)]


def _at_least_three(draw: Draw) -> Inputs:
    """Draw inputs for three ranks or more, with parts of at least two numbers: a message with a tag counts for 8
    bytes."""
    n, k = draw.integer(3, 4), draw.integer(2, 50)
    return [{"x": draw.tensor(n * k)} for _ in range(n)]


def _uneven(draw: Draw) -> Inputs:
    n = draw.integer(3, 4)
    shape = draw.choice([(rows, columns) for rows in range(1, 6) for columns in range(2, 10) if rows * columns % n])
    return [{"x": draw.tensor(*shape)} for _ in range(n)]


def _numbers(*shape: int, ranks: int) -> Callable[[Draw], Inputs]:
    return lambda draw: [{"x": draw.tensor(*shape)} for _ in range(ranks)]


_TURNED = [{"x": 10.0**r * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "turned": True} for r in range(3)]

RING = Exercise(
    "ring_all_reduce",
    reference=_sum_of_ranks,
    drive=_drive_ring,
    accept=[sends("send", "recv"), every_wait_follows, _nothing_is_rounded],
    cases=[
        Case("the three ranks of the drawing", [{"x": 10.0**r * torch.tensor([1.0, 2.0, 3.0])} for r in range(3)]),
        Case("3 rows of 2 numbers, the transpose of a contiguous tensor, on 3 ranks", _TURNED),
        Case(  # the second of these is tried in float64, where several ranks have to send it
            "one to four ranks", _even, points=2, hidden=True,
            fixed=[_numbers(4, ranks=2), _numbers(6, ranks=3), _numbers(3, ranks=1)],
        ),
        Case(  # of 5 numbers torch.chunk(4) makes three parts; with 3 numbers on 4 ranks one part is empty
            "a size that N does not divide, such as 5 numbers on 4 ranks", _uneven, points=2, hidden=True,
            fixed=[_numbers(5, ranks=4), _numbers(3, ranks=4)],
        ),
        Case(  # with two ranks, passing the whole tensor on costs no more
            "no more bytes than the ring needs, to one neighbour", _at_least_three, points=2, hidden=True,
            fixed=[_numbers(2, 3, ranks=3)],  # 2 rows are not 3 equal parts: cut is the flattened tensor
            accept=[sends("send", "recv", to_the_next=True, at_most=("2 (N-1)/N n", _ring_bound))],
        ),
    ],
    idea="In the drawing, which part does a rank send right after it has received one? And which does it send first?",
    hint="Phase 1, step k: send part (rank - k) % N, add what arrives to part (rank - k - 1) % N. "
    "Phase 2, step k: send part (rank + 1 - k) % N, put what arrives in the place of part (rank - k) % N. "
    "Start the send without waiting (isend), or all ranks wait for each other. "
    "Cut with tensor_split, which always makes N parts.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ f and g


def _drive_pair(exercise: Any, x: Any, w: Any, what: str) -> dict[str, Any]:
    import torch as t

    from labkit.process_group import mark

    x = x.requires_grad_()
    if what == "copy_to":
        y = exercise.copy_to(x)
    elif what == "reduce_from":
        y = exercise.reduce_from(x)
    else:
        y = exercise.reduce_from((exercise.copy_to(x) * w).tanh())
    mark("forward is over")
    given = t.ones_like(y) if what == "pair" else t.empty_strided(w.shape, w.stride(), dtype=w.dtype).copy_(w)
    y.backward(given)
    return {"y": y.detach(), "grad": x.grad, "given": given}


def _pair(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    what = ranks[0]["what"]
    if what == "copy_to":
        total = sum(r["w"] for r in ranks)
        return [{"y": r["x"], "grad": total, "given": r["w"]} for r in ranks]
    if what == "reduce_from":
        total = sum(r["x"] for r in ranks)
        return [{"y": total, "grad": r["w"], "given": r["w"]} for r in ranks]
    x = ranks[0]["x"].clone().requires_grad_()
    y = sum((x * r["w"]).tanh() for r in ranks)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return [{"y": y.detach(), "grad": grad, "given": torch.ones_like(x)}] * len(ranks)


def _one_way_only(answer: Answer) -> str | None:
    """Check that copy_to communicates in its backward pass alone, and reduce_from in its forward pass alone."""
    what = answer.inputs[0]["what"]
    for rank, one in enumerate(answer.evidence):
        middle = one.marks[-1][1]
        early, late = ([c.name for c in one.calls if (c.started < middle) == first] for first in (True, False))
        idle = {"copy_to": early, "reduce_from": late}.get(what)
        if idle:
            when = "forward" if what == "copy_to" else "in its backward"
            return f"{what} sends nothing {when}; on rank {rank} it calls {idle[0]} there"
    return None


def _tensors(what: str, ranks: int = 0) -> Any:
    def draw_them(draw: Draw) -> Inputs:
        shape = draw.integer(1, 6), draw.integer(2, 6)  # a tensor of one number has no strides
        x = draw.tensor(*shape)
        each = (lambda: x) if what != "reduce_from" else (lambda: draw.tensor(*shape))
        return [
            {"x": each().clone(), "w": draw.tensor(*shape), "what": what} for _ in range(ranks or draw.integer(2, 4))
        ]

    return draw_them


_TWO = [{"x": torch.ones(2), "w": w * torch.tensor([1.0, 2.0]), "what": "copy_to"} for w in (1, 10)]

PAIR = Exercise(
    "conjugates",
    without=["minimegatron.comm.collectives"],  # copy_to_region and reduce_from_region
    reference=_pair,
    function="copy_to",
    drive=_drive_pair,
    accept=[_one_way_only],
    cases=[
        Case("copy_to on two ranks: gradients 1, 2 and 10, 20", _TWO),
        Case("reduce_from on two ranks: x is 1, 2 and 10, 20", [
            {"x": x * torch.tensor([1.0, 2.0]), "w": torch.ones(2), "what": "reduce_from"} for x in (1, 10)]),
        Case("copy_to: forward and gradient", _tensors("copy_to"), hidden=True),
        Case("reduce_from: forward and gradient", _tensors("reduce_from"), hidden=True),
        Case("the pair around different work on each rank", _tensors("pair"), hidden=True, fixed=[_tensors("pair", 4)]),
    ],
    idea="In which of the two passes does each rank know only its own share of a sum?",
    hint="copy_to: return x forward; all-reduce a clone of the gradient backward. reduce_from: all-reduce a clone of x "
    "forward; return the gradient as it is backward.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- the divisor


def _drive_loss(exercise: Any, losses: Any, mask: Any, part: int, group: Any = None) -> dict[str, Any]:
    import torch as t

    losses = losses.requires_grad_()
    loss = t.as_tensor(exercise.rank_loss(losses, mask, group), dtype=losses.dtype)
    if loss.requires_grad:
        loss.backward()
    return {"loss": loss.detach(), "grad": losses.grad}


def parts(ranks: Inputs) -> list[list[int]]:
    """Ranks of the same `part` are a group."""
    return [[i for i, r in enumerate(ranks) if r["part"] == part] for part in sorted({r["part"] for r in ranks})]


def _rank_loss(ranks: Inputs) -> list[dict[str, Any]]:
    counts = Counter[int]()
    for r in ranks:
        counts[r["part"]] += int(r["mask"].sum())
    divisors = [max(counts[r["part"]], 1) for r in ranks]
    return [
        {"loss": (r["losses"] * r["mask"]).sum() / n, "grad": r["mask"] / n}
        for r, n in zip(ranks, divisors, strict=True)
    ]


def _masked(draw: Draw, ranks: int = 0, groups: int = 1) -> Inputs:
    shape = draw.integer(1, 3), draw.integer(6, 12)
    out = []
    for rank in range(ranks or draw.integer(2, 4)):
        mask = (draw.tensor(*shape) > draw.choice([-1.0, 0.0, 0.5])).float()
        mask[0, 0], mask[0, 1:].view(-1)[rank % 3] = 1.0, 0.0
        mask[0, 2 : 2 + rank] = 1.0
        out.append({"losses": draw.tensor(*shape), "mask": mask, "part": rank % groups})
    return out


def _two_groups(draw: Draw) -> Inputs:
    return _masked(draw, 4, groups=2)


def _one_empty(draw: Draw) -> Inputs:
    out = _masked(draw)
    out[0]["mask"] = torch.zeros_like(out[0]["mask"])
    return out


def _all_empty(draw: Draw) -> Inputs:
    return [{**r, "mask": torch.zeros_like(r["mask"])} for r in _masked(draw, 2)]


def _other_sizes(draw: Draw) -> Inputs:
    """Draw another number of sequences and of tokens for each rank."""
    return [{**_masked(draw, 1)[0], "losses": draw.tensor(b, s), "mask": (draw.tensor(b, s) > of).float()}
            for b, s, of in ((1, 5, -1.0), (3, 8, 0.0), (2, 3, 0.5))]  # fmt: skip


def _one_token(draw: Draw) -> Inputs:
    """Draw masks in which a single token of all ranks counts."""
    out = _all_empty(draw)
    out[1]["mask"][0, 2] = 1.0
    return out


_ONE_TO_FOUR: Inputs = [  # two sequences a rank, and no two of the numbers that may be mixed up are equal
    {"losses": torch.tensor([[1.0, 2, 9], [3, 7, 9]]), "mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]]), "part": 0},
    {"losses": torch.tensor([[4.0, 5, 9], [6, 8, 9]]), "mask": torch.tensor([[1.0, 0, 0], [0, 0, 0]]), "part": 0},
]

LOSS = Exercise(
    "rank_loss",
    reference=_rank_loss,
    drive=_drive_loss,
    group={"group": parts},
    cases=[
        Case("rank 0 counts the losses 1, 2, 3, and rank 1 counts 4", _ONE_TO_FOUR),
        Case("any counts, in each of two groups", _two_groups, points=2, hidden=True, fixed=[_masked, _other_sizes]),
        Case("a rank without a single counted token", _one_empty, hidden=True, fixed=[_one_token, _all_empty]),
    ],
    errors={
        "has returned": "Every rank of the group takes part in each all-reduce, also one without a counted token.",
        "deadlock": "The ranks in `group` take part in each all-reduce, all of them and no others.",
    },
    idea="By which one number must all ranks divide, so that their shares add up to the mean over all counted tokens?",
    hint="Sum this rank's masked losses; divide by the all-reduced number of counted tokens of all ranks in `group`. "
    "Never by zero: the loss is 0 where no token counts.",
)  # fmt: skip
