"""Lab 04, the backward pass: gradients that travel with their block, and which block a gradient was computed with.

A block of keys and values goes round the ring as in the forward pass; its gradient travels behind it, and every rank
adds its part. The own block is the only work that no message brings: some of it goes beside the first message, and the
rest beside the last. What is summed over ranks is not rounded in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from labkit.checks import at_most, peak_at_most, sends
from labkit.compare import ANYTHING
from labkit.exercises import Answer, Case, Draw, Exercise
from labkit.parts import named
from labkit.process_group import Call

from .forward import four_tokens, kv_bytes, ring, ring_inputs, wide
from .pieces import Triple, piece_backward
from .predicted import positions

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
    of = ranks[0]["q"].dtype
    ranks = [{n: t.double() if torch.is_tensor(t) else t for n, t in one.items()} for one in ranks]
    parts = [[_part(ranks, r, owner, owner) for owner in every] for r in every]
    dq = [torch.stack([parts[r][owner][0] for owner in every]).sum(0) for r in every]
    dk, dv = ([torch.stack([parts[r][owner][i] for r in every]).sum(0) for owner in every] for i in (1, 2))
    return [{"dq": dq[r].to(of), "dk": dk[r].to(of), "dv": dv[r].to(of)} for r in every]


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


def _in_float64(draw: Draw) -> Inputs:
    return [{n: t.double() if torch.is_tensor(t) else t for n, t in one.items()} for one in _back_inputs(draw, 3)]


def _two_heads(draw: Draw, cp: int) -> Inputs:
    """Draw two heads: the own block may be divided by heads, by queries, or by keys."""
    at, n, d = [positions(8 * cp, cp, r) for r in range(cp)], 8, 3
    ranks = [{**{x: draw.tensor(2, n, d) for x in "qkv"}, "at": [t.clone() for t in at]} for _ in range(cp)]
    for r, o in zip(ranks, ring(ranks), strict=True):
        r.update(dout=draw.tensor(2, n, d), **o)
    return ranks


def _a_quarter(inputs: Inputs) -> int:
    """Multiply-adds of a piece of half the queries and half the keys: S, dP, dQ, dK and dV."""
    heads, n, d = inputs[0]["q"].shape
    return int(5 * heads * (n // 2) ** 2 * d)


def _ends(calls: Sequence[Call]) -> list[tuple[Call, int]]:
    """Each send, and the place of the first wait for it or for the receive that belongs to it, the same in order."""
    sent, come = ([call for call in calls if call.name == name] for name in ("send", "recv"))
    found = []
    for i, call in enumerate(sent):
        waits = [
            one.waited_at for one in (call, *come[i : i + 1]) if one.waited is not None and one.waited_at >= call.at
        ]
        found.append((call, min(waits, default=call.at)))
    return found


def _all_hidden(answer: Answer) -> str | None:
    """Check that each message by itself, the first and the last too, travels beside a quarter of a piece."""
    enough = _a_quarter(answer.inputs)
    for rank, one in enumerate(answer.evidence):
        products = [(at, much) for at, (what, much) in zip(one.places, one.order, strict=True) if what == "matmul"]
        ends = _ends(one.calls)
        for i, (call, end) in enumerate(ends, 1):
            beside = sum(much for at, much in products if call.at < at <= end)
            if beside < enough:
                return (
                    f"rank {rank}, message {i} of {len(ends)}: {beside} multiply-adds are done between its start and "
                    f"the wait for it; a quarter of a piece has {enough}"
                )
    return None


_EXACT = 1.1  # times the error of one rounding
_NAMES = ("dq", "dk", "dv")


def _in_bf16(draw: Draw) -> Inputs:
    """Draw inputs in bf16 on 8 ranks, with lse in fp32."""
    ranks = _two_heads(draw, 8)
    for one in ranks:
        one.update({name: one[name].bfloat16() for name in ("q", "k", "v", "dout")})
    for one, o in zip(ranks, ring([{**one, **{n: one[n].float() for n in "qkv"}} for one in ranks]), strict=True):
        one.update(out=o["out"].bfloat16(), lse=o["lse"])
    return ranks


def _any_back(ranks: Inputs) -> list[dict[str, Any]]:
    return [dict.fromkeys(_NAMES, ANYTHING) for _ in ranks]


def _rounded_once(answer: Answer) -> str | None:
    ranks = [{n: t.double() if torch.is_tensor(t) else t for n, t in one.items()} for one in answer.inputs]
    exact = _ring_back(ranks)
    for name in _NAMES:
        got = [named(one, _NAMES)[name] for one in answer.value]
        if others := [t.dtype for t in got if t.dtype != torch.bfloat16]:
            return f"{name} is {str(others[0]).removeprefix('torch.')}; the inputs are bfloat16"
        want = torch.cat([one[name] for one in exact])
        off = (torch.cat(got).double() - want).norm() / (want.bfloat16().double() - want).norm()
        if not off <= _EXACT:
            return f"{name}: its error is {off:.1f} times that of one rounding; at most {_EXACT} is asked"
    return None


BACK = Exercise(
    "ring_backward",
    reference=_ring_back,
    outputs=_NAMES,
    drive=_drive_back,
    axis="cp",
    cases=[
        Case("2 ranks, 4 tokens, every score 0, a gradient for token 2 alone", _third_token()),
        Case("2 to 4 ranks, in float64 as well", _back_inputs, hidden=True, fixed=[
            partial(_back_inputs, cp=2), _in_float64]),
        Case("8 ranks: K, V and their gradients go round once, and no rank keeps them", _wide_back, draws=1,
             hidden=True, accept=[
                 sends("send", "recv", to_the_next=True, at_most=("2C blocks", lambda i: 2 * len(i) * kv_bytes(i))),
                 peak_at_most("the bound, twelve blocks,", lambda i: 12 * kv_bytes(i))]),
        Case("2 and 4 ranks: every message travels beside a quarter of a piece", partial(_two_heads, cp=4), draws=1,
             hidden=True, fixed=[partial(_two_heads, cp=2)], accept=[sends("send", "recv"), _all_hidden]),
        Case("8 ranks in bf16: dq, dk, dv as exact as after one rounding", _in_bf16, draws=1, hidden=True,
             reference=_any_back, accept=[_rounded_once, at_most(
                 "the bound, C blocks of K and V in bf16 and C of their gradients in fp32,",
                 lambda i: 3 * len(i) * kv_bytes(i), "send")]),
    ],
    idea="The gradient of a block makes the block's journey, one step behind, and each rank adds its part. Which work "
    "needs no message, and how much of it does the first message need?",
    hint="Half of your own block's work goes beside the first message, half beside the last: piece_backward takes any "
    "of the queries. In between start K, V first, compute, then wait for the gradient of this block, add and send it. "
    "Compute and add in lse's dtype, K and V travel in their own; round once, at the end.",
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
