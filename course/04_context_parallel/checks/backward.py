"""Lab 04, the backward pass: gradients that travel with their block, and which block a gradient was computed with.

A block of keys and values goes round the ring as in the forward pass; its gradient travels with it, and every rank adds
its part. Mistakes differ in whose block was used, whose part was added, and where the gradient ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labkit.checks import at_most, only, to_the_next
from labkit.exercises import Case, Draw, Exercise, Mistake

from .forward import four_tokens, kv_bytes, ring, ring_inputs
from .pieces import Triple, piece_backward

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- ring, backward


def _drive_back(
    exercise: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, at: Any, cp: Any
) -> dict[str, Any]:
    dq, dk, dv = exercise.ring_backward(dout, q, k, v, out, lse, list(at), cp)
    return {"dq": dq, "dk": dk, "dv": dv}


def _part(ranks: Inputs, visitor: int, owner: int, block: int, **how: bool) -> Triple:
    """The gradient that the queries of `visitor` add for the tokens of `owner`, with the keys and values of `block`."""
    mine, kv = ranks[visitor], ranks[block]
    rest = mine["out"], mine["lse"], mine["at"][visitor], mine["at"][owner]
    return piece_backward(mine["dout"], mine["q"], kv["k"], kv["v"], *rest, **how)


def _ring_back(
    ranks: Inputs, stale: int = 0, places: Callable[[int, int], int] = lambda r, owner: owner, **how: bool
) -> list[dict[str, torch.Tensor]]:
    """The backward pass of the ring.

    Args:
        stale: the number of ranks by which the block of a step is off; 0 is right.
        places: the rank whose places make the mask.
    """
    size = len(ranks)
    dqs: list[Any] = [0.0] * size
    dkvs: list[Any] = [0.0] * size
    for r in range(size):
        for owner in range(size):
            dq, dk, dv = _part(ranks, r, places(r, owner) % size, (owner + stale) % size, **how)
            dqs[r] = dqs[r] + dq
            dkvs[owner] = dkvs[owner] + torch.stack((dk, dv))
    return [{"dq": dq, "dk": dkv[0], "dv": dkv[1]} for dq, dkv in zip(dqs, dkvs, strict=True)]


def _one_part(by: int) -> Callable[[Inputs], list[dict[str, torch.Tensor]]]:
    """Return a mistake: a block's gradient has only what one rank added, its owner (0) or its last visitor (-1)."""

    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        parts = [_part(ranks, (r + by) % len(ranks), r, r) for r in range(len(ranks))]
        right = _ring_back(ranks)
        return [{"dq": mine["dq"], "dk": dk, "dv": dv} for mine, (_, dk, dv) in zip(right, parts, strict=True)]

    return answer


def _not_home(by: int) -> Callable[[Inputs], list[dict[str, torch.Tensor]]]:
    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        right = _ring_back(ranks)
        others = [right[(r + by) % len(ranks)] for r in range(len(ranks))]
        return [{"dq": mine["dq"], "dk": o["dk"], "dv": o["dv"]} for mine, o in zip(right, others, strict=True)]

    return answer


def _own_part_twice(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _ring_back(ranks)
    own = [_part(ranks, r, r, r) for r in range(len(ranks))]
    return [{**one, "dk": one["dk"] + dk, "dv": one["dv"] + dv} for one, (_, dk, dv) in zip(right, own, strict=True)]


def _parts_of_one_rank(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistake: dK and dV are what one rank's queries add, for all blocks together."""
    found = []
    for r, right in enumerate(_ring_back(ranks)):
        parts = [_part(ranks, r, owner, owner) for owner in range(len(ranks))]
        dk, dv = (torch.stack([part[which] for part in parts]).sum(0) for which in (1, 2))
        found.append({"dq": right["dq"], "dk": dk, "dv": dv})
    return found


def _travelling_dq(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistake: dQ is summed over all visitors of a block."""
    size = len(ranks)
    dqs = [torch.stack([_part(ranks, visitor, r, r)[0] for visitor in range(size)]).sum(0) for r in range(size)]
    return [{**right, "dq": dq} for right, dq in zip(_ring_back(ranks), dqs, strict=True)]


def _last_step(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistake: dQ is that of the block that came last, which is the next rank's."""
    size = len(ranks)
    last = [_part(ranks, r, (r + 1) % size, (r + 1) % size)[0] for r in range(size)]
    return [{**one, "dq": dq} for one, dq in zip(_ring_back(ranks), last, strict=True)]


def _averaged(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    return [{**one, "dq": one["dq"] / len(ranks)} for one in _ring_back(ranks)]


def _back_inputs(draw: Draw, cp: int = 0, apart: float = 1.0) -> Inputs:
    """Draw inputs; `apart` is how much the keys and values of two ranks differ."""
    ranks = ring_inputs(draw, cp)
    for r in ranks[1:]:
        r.update({name: ranks[0][name] + apart * (r[name] - ranks[0][name]) for name in "kv"})
    for r, o in zip(ranks, ring(ranks), strict=True):
        r.update(dout=draw.tensor(*r["q"].shape), **o)
    return ranks


def _third_token() -> Inputs:
    """2 ranks, every score 0; only the output at place 2 has a gradient, of 6 in its first number.

    P is 1/3 and out 5, so dS is -3, -1, 4, and dQ 7. The last token sees all keys, so it would not tell whose block was
    used.
    """
    ranks = four_tokens()
    for r, (one, o) in enumerate(zip(ranks, ring(ranks), strict=True)):
        dout = torch.zeros_like(one["q"])
        dout[0, :, 0] = 6.0 * (one["at"][r] == 2)
        one.update(dout=dout, **o)
    return ranks


BACK = Exercise(
    "ring_backward",
    reference=_ring_back,
    drive=_drive_back,
    axis="cp",
    cases=[
        Case("2 ranks, 4 tokens, every score 0, a gradient for token 2 alone", _third_token()),
        Case("2 to 4 ranks", _back_inputs, points=2, hidden=True, fixed=[partial(_back_inputs, cp=2)]),
        Case("K, V and their gradients go round once, to the next rank", partial(_back_inputs, cp=4), hidden=True,
             points=2, accept=[only("send", "recv"), to_the_next, at_most(
                 "2C blocks", lambda i: 2 * len(i) * kv_bytes(i), "send")]),
    ],
    mistakes=[
        Mistake(_one_part(0), "dK and dV hold only what your own queries add. Other ranks' queries saw your keys too: "
                "the gradient must travel with the block and collect their parts."),
        Mistake(_not_home(1), "Each rank returns the gradient of the next rank's block: one more hop brings it home."),
        Mistake(_not_home(-1), "Each rank returns the gradient of the block of the rank before: one hop too many."),
        Mistake(_one_part(-1), "The gradient that arrives must be *added* to this rank's part before it travels on."),
        Mistake(lambda ranks: _ring_back(ranks, stale=1), "You use another rank's keys and values: at step i the block "
                "must be that of rank (r - i) mod C, at step 0 your own."),
        Mistake(lambda ranks: _ring_back(ranks, stale=-1), "You use another rank's keys and values: at step i the "
                "block must be that of rank (r - i) mod C, at step 0 your own."),
        Mistake(_own_part_twice, "Your own part of dK and dV is in the sum twice."),
        Mistake(_parts_of_one_rank, "You add up gradients of different blocks. Those of a block belong to its owner: "
                "they travel with it and collect the parts of all ranks."),
        Mistake(_travelling_dq, "dQ has travelled and holds what other ranks' queries added. It stays here: only dK "
                "and dV travel."),
        *(
            Mistake(lambda ranks, places=places: _ring_back(ranks, places=places), "The mask has the places of another "
                    "rank: at step i the keys are those of rank (r - i) mod C.")
            for places in (lambda r, owner: r, lambda r, owner: 2 * r - owner)
        ),
        Mistake(_last_step, "dQ is that of the last step alone: the other blocks have their terms, too."),
        Mistake(_averaged, "dQ is divided by the number of ranks: it is the sum of the pieces' terms, not their mean."),
        Mistake(lambda ranks: _ring_back(ranks, own_lse=True), "Use the final lse, which is given."),
    ],
    idea="The gradient of a block makes the block's journey, one step behind, and each rank adds its part.",
    hint="K, V go round as in the forward. At each step: piece_backward; add dq; add what has arrived from the rank "
    "before to this block's dK, dV and send the sum on. After C hops it is home.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- whose block


def _blocks_used(
    dqs: Any, dout: Any, q: Any, out: Any, lse: Any, ks: Any, vs: Any, at: Any, rank: int,
    *, owner: Callable[[int, int, int], int],
) -> list[int]:  # fmt: skip
    """The blocks that explain these dq, step by step.

    Args:
        owner: `owner(rank, step, block)`, the rank whose places the keys of a candidate block are taken to have.
    """
    size, found = len(ks), []
    for step, got in enumerate(dqs):
        k_at = [at[owner(rank, step, j) % size] for j in range(size)]
        tries = [piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], k_at[j])[0] for j in range(size)]
        found.append(min(range(size), key=lambda j: float((tries[j] - got).norm())))
    return found


def _first_within(
    dqs: Any, dout: Any, q: Any, out: Any, lse: Any, ks: Any, vs: Any, at: Any, rank: int, tolerance: float
) -> list[int]:
    size, found = len(ks), []
    for step, got in enumerate(dqs):
        places = at[rank], at[(rank - step) % size]
        tries = [piece_backward(dout, q, k, v, out, lse, *places)[0] for k, v in zip(ks, vs, strict=True)]
        found.append(next((j for j, one in enumerate(tries) if float((one - got).norm()) < tolerance), -1))
    return found


blocks_used = partial(_blocks_used, owner=lambda rank, step, block: rank - step)


def _case_of(
    order: Callable[[Draw, int, int], list[int]], size: int = 0, rank: int = -1, apart: float = 1.0,
    gradient: float = 1.0,
) -> Callable[[Draw], Any]:  # fmt: skip
    """Return a draw of the blocks that a ring of `size` uses at `rank`; where they are little `apart`, only the right
    mask tells them from each other.

    Args:
        gradient: the size of dout, and so of all dq; a very small one defeats a fixed tolerance.
    """

    def inputs(draw: Draw) -> dict[str, Any]:
        ranks = _back_inputs(draw, size or draw.integer(3, 4), apart)
        for one in ranks:
            one["dout"] = gradient * one["dout"]
        me = rank if rank >= 0 else draw.integer(0, len(ranks) - 1)
        mine, at, blocks = ranks[me], ranks[me]["at"], order(draw, me, len(ranks))
        dqs = [_part(ranks, me, (me - i) % len(ranks), block)[0] for i, block in enumerate(blocks)]
        return {
            "dqs": dqs, **{n: mine[n] for n in ("dout", "q", "out", "lse")}, "ks": [r["k"] for r in ranks],
            "vs": [r["v"] for r in ranks], "at": at, "rank": me,
        }  # fmt: skip

    return inputs


def _two_ranks() -> dict[str, Any]:
    """The gradients that rank 0 of 2 sees in a right ring over four tokens, in numbers that can be worked out by
    hand."""
    ranks = four_tokens()
    for one in ranks:
        one.update({name: one[name][..., :2].clone() for name in "qkv"})
    for one, o in zip(ranks, ring(ranks), strict=True):
        one.update(dout=torch.tensor([[[0.0, 0.0], [8.0, 0.0]]]), **o)
    mine = ranks[0]
    return {
        "dqs": [_part(ranks, 0, owner, owner)[0] for owner in (0, 1)],
        **{n: mine[n] for n in ("dout", "q", "out", "lse")}, "ks": [r["k"] for r in ranks],
        "vs": [r["v"] for r in ranks], "at": mine["at"], "rank": 0,
    }  # fmt: skip


def _shuffled(draw: Draw, rank: int, size: int) -> list[int]:
    return draw.random.sample(range(size), size)


def _blocks(*used: int) -> Callable[[Draw, int, int], list[int]]:
    return lambda draw, rank, size: list(used)


def _ahead(rank: int, ks: Any, **inputs: Any) -> Any:
    """A mistake: distances in place of ranks. With two ranks it is not unambiguous."""
    if len(ks) == 2:
        return NotImplemented
    used = blocks_used(rank=rank, ks=ks, **inputs)
    return [(block - rank + step) % len(ks) for step, block in enumerate(used)]


USED = Exercise(
    "blocks_used",
    reference=blocks_used,
    cases=[
        Case("a ring of two that is right, four tokens", _two_ranks(), draws=1, fixed=[
            _case_of(lambda draw, r, size: [(r - i) % size for i in range(size)])]),
        Case("one that uses a single block", _case_of(lambda draw, r, size: [draw.integer(0, size - 1)] * size),
             hidden=True, fixed=[_case_of(_blocks(2, 2, 2), 3, 1), _case_of(_blocks(0, 0, 0, 0), 4, 2)]),
        Case("any blocks", _case_of(_shuffled), points=2, hidden=True, fixed=[
            _case_of(_blocks(1, 2, 3, 0), 4, 1), _case_of(_blocks(0, 2, 0), 3, 0),
            _case_of(_blocks(1, 2, 3, 0), 4, 1, gradient=1e-5), _case_of(_blocks(1, 2, 3, 0), 4, 1, gradient=1e4),
            _case_of(_blocks(2, 2, 1, 3), 4, 3), _case_of(_blocks(2, 1, 0, 3), 4, 1, apart=0.03)]),
    ],
    mistakes=[
        Mistake(
            lambda dqs, rank, ks, **_: [(rank - i) % len(ks) for i in range(len(dqs))],
            "That is which blocks *should* be used. Find out which were.",
        ),
        Mistake(
            lambda dqs, rank, ks, **_: [(rank + 1 - i) % len(ks) for i in range(len(dqs))],
            "This ring is not always one ahead. Test every block at every step.",
        ),
        Mistake(
            lambda rank, ks, **i: [(rank - j) % len(ks) for j in blocks_used(rank=rank, ks=ks, **i)],
            "That is how far away the owner is. Return the owner's rank.",
        ),
        *(
            Mistake(
                partial(_first_within, tolerance=tolerance),
                "Your tolerance is a number of its own: where gradients are small every block is within it. Take the "
                "nearest, or measure by the size of dq.",
            )
            for tolerance in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
        ),
        Mistake(
            _ahead,
            "That is how many ranks the ring was ahead. Return the rank whose block was used.",
        ),
        *(
            Mistake(
                partial(_blocks_used, owner=owner),
                "You try the blocks under another mask than the ring's. At step i it used the places of rank "
                "(r - i) mod C, whatever block it had.",
            )
            for owner in (lambda rank, step, block: block, lambda rank, step, block: rank,
                          lambda rank, step, block: rank + step)
        ),
    ],
    idea="You know every block that could have been used. What would step i's dq be with each, under that step's mask?",
    hint="At step i the mask is that of at[(rank - i) mod C]. Compute piece_backward with every block's keys and "
    "values and take the one whose dq equals dqs[i].",
)  # fmt: skip
