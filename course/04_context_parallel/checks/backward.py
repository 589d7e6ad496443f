"""Lab 04, the backward pass: gradients that travel with their block, and which block a gradient was computed with.

A block of keys and values goes round the ring as in the forward pass; its gradient travels with it, and every rank adds
its part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labkit.checks import peak_at_most, sends
from labkit.exercises import Case, Draw, Exercise

from .forward import four_tokens, kv_bytes, ring, ring_inputs, wide
from .pieces import Triple, piece_backward

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- ring, backward


def _drive_back(
    exercise: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, at: Any, cp: Any, wide: bool = False
) -> Any:
    """Run the learner's ring. With `wide` a piece of the judge stands in for the learner's, whose memory is not the
    ring's."""

    def plain(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, q_at: Any, k_at: Any) -> Any:
        p = (q @ k.mT / q.shape[-1] ** 0.5 - lse[..., None]).exp() * (k_at <= q_at[:, None])
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return ds @ k, ds.mT @ q, p.mT @ dout

    own = getattr(exercise, "piece_backward", None)
    if wide and own is not None:
        exercise.piece_backward = plain
    try:
        return exercise.ring_backward(dout, q, k, v, out, lse, list(at), cp)
    finally:
        if own is not None:
            exercise.piece_backward = own


def _part(ranks: Inputs, visitor: int, owner: int, block: int) -> Triple:
    """The gradient that the queries of `visitor` add for the tokens of `owner`, with the keys and values of `block`."""
    mine, kv = ranks[visitor], ranks[block]
    rest = mine["out"], mine["lse"], mine["at"][visitor], mine["at"][owner]
    return piece_backward(mine["dout"], mine["q"], kv["k"], kv["v"], *rest)


def _ring_back(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    every = range(len(ranks))
    parts = [[_part(ranks, r, owner, owner) for owner in every] for r in every]
    dq = [torch.stack([parts[r][owner][0] for owner in every]).sum(0) for r in every]
    dk, dv = ([torch.stack([parts[r][owner][i] for r in every]).sum(0) for owner in every] for i in (1, 2))
    return [{"dq": dq[r], "dk": dk[r], "dv": dv[r]} for r in every]


def _back_inputs(draw: Draw, cp: int = 0, apart: float = 1.0) -> Inputs:
    """Draw inputs; `apart` is how much the keys and values of two ranks differ."""
    ranks = ring_inputs(draw, cp)
    for r in ranks[1:]:
        r.update({name: ranks[0][name] + apart * (r[name] - ranks[0][name]) for name in "kv"})
    for r, o in zip(ranks, ring(ranks), strict=True):
        r.update(dout=draw.tensor(*r["q"].shape), **o)
    return ranks


def _wide_back(draw: Draw) -> Inputs:
    """Draw inputs on 8 ranks that are so wide that the scores of a piece are small beside its keys."""
    ranks = wide(draw)
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
    outputs=("dq", "dk", "dv"),
    drive=_drive_back,
    axis="cp",
    cases=[
        Case("2 ranks, 4 tokens, every score 0, a gradient for token 2 alone", _third_token()),
        Case("2 to 4 ranks", _back_inputs, points=2, hidden=True, fixed=[partial(_back_inputs, cp=2)]),
        Case("8 ranks: K, V and their gradients go round once, and no rank keeps them", _wide_back, points=2, draws=1,
             hidden=True, accept=[
                 sends("send", "recv", to_the_next=True, at_most=("2C blocks", lambda i: 2 * len(i) * kv_bytes(i))),
                 peak_at_most("the bound, ten blocks,", lambda i: 10 * kv_bytes(i))]),
    ],
    idea="The gradient of a block makes the block's journey, one step behind, and each rank adds its part.",
    hint="K, V go round as in the forward. At each step: piece_backward; add dq; add what has arrived from the rank "
    "before to this block's dK, dV and send the sum on. After C hops it is home.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- whose block


def blocks_used(
    dqs: Any, dout: Any, q: Any, out: Any, lse: Any, ks: Any, vs: Any, at: Any, rank: int
) -> list[int]:  # fmt: skip
    """The blocks that explain these dq, step by step."""
    size, found = len(ks), []
    for step, got in enumerate(dqs):
        k_at = at[(rank - step) % size]
        tries = [piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], k_at)[0] for j in range(size)]
        found.append(min(range(size), key=lambda j: float((tries[j] - got).norm())))
    return found


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
        return _seen_by(ranks, me, order(draw, me, len(ranks)))

    return inputs


def _seen_by(ranks: Inputs, me: int, blocks: list[int]) -> dict[str, Any]:
    """The inputs on one rank, if its ring used these blocks step by step."""
    mine = ranks[me]
    return {
        "dqs": [_part(ranks, me, (me - i) % len(ranks), block)[0] for i, block in enumerate(blocks)],
        **{name: mine[name] for name in ("dout", "q", "out", "lse", "at")}, "ks": [r["k"] for r in ranks],
        "vs": [r["v"] for r in ranks], "rank": me,
    }  # fmt: skip


def _two_ranks() -> dict[str, Any]:
    """The gradients that rank 0 of 2 sees in a right ring over four tokens, in numbers that can be worked out by
    hand."""
    ranks = four_tokens()
    for one in ranks:
        one.update({name: one[name][..., :2].clone() for name in "qkv"})
    for one, o in zip(ranks, ring(ranks), strict=True):
        one.update(dout=torch.tensor([[[0.0, 0.0], [8.0, 0.0]]]), **o)
    return _seen_by(ranks, 0, [0, 1])


def _shuffled(draw: Draw, rank: int, size: int) -> list[int]:
    return draw.random.sample(range(size), size)


def _blocks(*used: int) -> Callable[[Draw, int, int], list[int]]:
    return lambda draw, rank, size: list(used)


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
    idea="You know every block that could have been used. What would step i's dq be with each, under that step's mask?",
    hint="At step i the mask is that of at[(rank - i) mod C]. Compute piece_backward with every block's keys and "
    "values and take the one whose dq equals dqs[i].",
)  # fmt: skip
