"""Lab 04, messages of the forward pass: keys and values round a ring, or an exchange of heads for tokens.

References on ranks get the inputs of all ranks. A ring is judged by its neighbours, its bytes, the work that was done
while a block travelled, and the work that was skipped.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from labkit.checks import overlaps, peak_at_most, sends
from labkit.exercises import Answer, Case, Draw, Exercise

from .attention import dense
from .predicted import positions

Inputs = list[dict[str, Any]]

# ------------------------------------------------------------------------------------------------ ring, forward


def _drive_ring(
    exercise: Any, q: Any, k: Any, v: Any, at: Any, cp: Any, count: bool = False, wide: bool = False
) -> dict[str, Any]:
    """Run the learner's ring; with `count` first one query and one key with the learner's own `attend`, if there is
    one, and then a product of 97 multiply-adds as a mark. With `wide` an attend of the judge stands in for the
    learner's, whose memory is not the ring's."""
    import contextlib

    import torch

    def plain(q: Any, k: Any, v: Any, q_at: Any, k_at: Any, block: int) -> Any:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(q_at[:, None] < k_at, -torch.inf)
        lse = scores.logsumexp(-1)
        return (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v, lse

    own = getattr(exercise, "attend", None)
    if wide and own is not None:
        exercise.attend = plain
    if count:
        with contextlib.suppress(Exception):  # the ring may do without it
            from exercises.attend import attend

            attend(q[:, :1], k[:, :1], v[:, :1], at[0][:1], at[0][:1], 1)
        torch.ones(1, 97) @ torch.ones(97, 1)
    try:
        out, lse = exercise.ring_forward(q, k, v, list(at), cp)
    finally:
        if own is not None:
            exercise.attend = own
    return {"out": out, "lse": lse}


def _joined(ranks: Inputs, name: str) -> torch.Tensor:
    return torch.cat([r[name] for r in ranks], 1)


def ring(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    k, v, k_at = _joined(ranks, "k"), _joined(ranks, "v"), torch.cat(ranks[0]["at"])
    both = [dense(r["q"], k, v, r["at"][i], k_at) for i, r in enumerate(ranks)]
    return [{"out": out, "lse": lse} for out, lse in both]


def ring_inputs(draw: Draw, cp: int = 0, half: int = 0, zigzag: bool = True) -> Inputs:
    cp = cp or draw.integer(3, 4)
    a, n, d = draw.integer(1, 3), 2 * (half or draw.integer(2, 4)), draw.choice([3, 5])
    at = [positions(n * cp, cp, r, zigzag) for r in range(cp)]
    return [{**{name: draw.tensor(a, n, d) for name in "qkv"}, "at": [t.clone() for t in at]} for _ in range(cp)]


def four_tokens() -> Inputs:
    """2 ranks, every score 0: out at place i is the mean of the values up to there, 2, 3, 5, 4; lse is log(i + 1)."""
    at = [positions(4, 2, r) for r in range(2)]
    ranks = []
    for held in at:
        q, k, v = torch.zeros(3, 1, 2, 4).unbind()
        q[0, :, 0], k[0, :, 1], v[0, :, 0] = 1.0, 1.0 + held, torch.tensor([2.0, 4.0, 9.0, 1.0])[held]
        ranks.append({"q": q, "k": k, "v": v, "at": [places.clone() for places in at]})
    return ranks


def wide(draw: Draw) -> Inputs:
    """Draw inputs on 8 ranks, zigzag, so wide that the scores of a block are small beside its keys."""
    at = [positions(32, 8, r) for r in range(8)]
    return [{**{n: draw.tensor(1, 4, 32) for n in "qkv"}, "at": [t.clone() for t in at], "wide": True} for _ in at]


def kv_bytes(inputs: Inputs) -> int:
    return int(2 * inputs[0]["k"].nbytes)


def _counted(draw: Draw) -> Inputs:
    """Draw so many tokens that the work of merging, which may be a product too, is small beside that of attention."""
    return [{**one, "count": True} for one in ring_inputs(draw, cp=4, half=16)]


def _a_hop_too_many(answer: Answer) -> str | None:
    size = len(answer.inputs)
    for rank, one in enumerate(answer.evidence):
        if one.nbytes("send") == size * kv_bytes(answer.inputs):
            return f"rank {rank} sends {size} blocks, C hops; C-1 bring each block to all ranks, and the last is unused"
    return None


def _keys_and_values_alone(answer: Answer) -> str | None:
    bound = (len(answer.inputs) - 1) * kv_bytes(answer.inputs)
    for rank, one in enumerate(answer.evidence):
        if (sent := one.nbytes("send")) > bound:
            return f"rank {rank} sends {sent} bytes; K and V are all that must travel, and (C-1) blocks are {bound}"
    return None


def _computes_meanwhile(answer: Answer) -> str | None:
    sentence = overlaps("send", _half_a_block_each, "the block")(answer)
    before = "Nothing is computed between sending and waiting: " if sentence and ": 0 of " in sentence else ""
    return sentence and before + sentence


def _hidden_skipped(answer: Answer) -> str | None:
    """Check that hidden pairs are not computed: an undivided q costs the first ranks most, a block of n keys the last
    ones."""
    q, size = answer.inputs[0]["q"], len(answer.inputs)
    enough = 2 * q.numel() * q.shape[1] * (size + 1) // 2  # the own block, and half of each other
    too_much = {}
    for rank, one in enumerate(answer.evidence):
        done = [much for what, much in one.order if what == "matmul"]
        first = done.index(97)
        a_pair = sum(done[:first]) / (2 * q.shape[0] * q.shape[2])  # above 1 where `attend` makes a second pass
        all_of_it = sum(done[first + 1 :])
        if all_of_it > max(a_pair, 1) * enough:
            too_much[rank] = all_of_it
    if not too_much:
        return None
    rank, much = next(iter(too_much.items()))
    cut = {  # whether the first rank does too much, and the last one
        (
            True,
            True,
        ): "keys that only some queries of a call see are computed for all, and a block of n keys goes whole",
        (True, False): "keys that only some of the queries of a call see are computed for all of them",
        (False, True): "of a block of n keys nothing is skipped where one half is seen",
        (False, False): "skip what the mask hides",
    }[0 in too_much, size - 1 in too_much]
    return f"rank {rank} does {much} multiply-adds; {enough} are enough without what is hidden: {cut}"


def _half_a_block_each(inputs: Inputs) -> float:
    q = inputs[0]["q"]
    return float((len(inputs) - 1) * q.numel() * q.shape[1])


_four = partial(ring_inputs, cp=4)

RING = Exercise(
    "ring_forward",
    reference=ring,
    drive=_drive_ring,
    axis="cp",
    cases=[
        Case("2 ranks, 4 tokens, every score 0: out[i] is the mean of v[0..i]", four_tokens()),
        Case("2 to 4 ranks, zigzag and contiguous", ring_inputs, hidden=True, fixed=[
            partial(ring_inputs, cp=2), partial(ring_inputs, cp=3, zigzag=False)]),
        Case("8 ranks: K and V travel to the next rank, C-1 times, and no rank keeps them", wide, hidden=True, draws=1,
             accept=[
                 sends("send", "recv", to_the_next=True), _a_hop_too_many,
                 _keys_and_values_alone,
                 peak_at_most("the bound, eight blocks,", lambda i: 8 * kv_bytes(i))]),
        Case("the next block travels while this one is used", _four, hidden=True, points=2, accept=[
            sends("send", "recv"), _computes_meanwhile]),
        Case("quarters that are hidden whole are not computed", _counted, hidden=True, accept=[_hidden_skipped]),
        Case("these ranks are a part of the world", partial(ring_inputs, cp=3), hidden=True),  # of a smaller group
    ],
    idea="Queries and out stay, K and V come by. Send a block on before you compute with it; what has arrived "
    "meanwhile is the block of the next step.",
    hint="At step i the block of rank (r - i) mod C is here. Start its journey to the next rank first, attend with "
    "each half of q by itself, the keys in blocks of n/2; merge; then wait. Start with out 0 and lse -inf.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------------- all-to-all


def _drive_ulysses(exercise: Any, x: Any, y: Any, cp: Any) -> dict[str, Any]:
    return {"heads": exercise.heads_for_tokens(x, cp), "tokens": exercise.tokens_for_heads(y, cp)}


def _ulysses(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    size, n = len(ranks), ranks[0]["x"].shape[1]
    held = [positions(n * size, size, r) for r in range(size)]
    heads = _joined(ranks, "x")[:, torch.cat(held).argsort()].chunk(size)
    back = torch.cat([r["y"] for r in ranks], 0)
    return [{"heads": heads[r].clone(), "tokens": back[:, held[r]]} for r in range(size)]


def _heads(draw: Draw, cp: int = 0) -> Inputs:
    cp = cp or draw.integer(3, 4)
    a, n, d = draw.integer(2, 3), 2 * draw.integer(2, 3), draw.choice([3, 5])
    return [{"x": draw.tensor(a * cp, n, d), "y": draw.tensor(a, n * cp, d)} for _ in range(cp)]


def _numbered() -> Inputs:
    """2 ranks, 4 heads, 8 tokens, width 1: head 1 at place 5 is 15."""
    whole = (10 * torch.arange(4.0)[:, None] + torch.arange(8.0))[..., None]
    return [{"x": whole[:, positions(8, 2, r)], "y": whole[2 * r : 2 * r + 2].clone()} for r in range(2)]


ULYSSES = Exercise(
    "ulysses",
    reference=_ulysses,
    drive=_drive_ulysses,
    axis="cp",
    cases=[
        Case("2 ranks, 4 heads, 8 tokens; each number is 10·head + place", _numbered()),
        Case("up to 4 ranks", _heads, points=2, hidden=True),
        Case("one all-to-all each way, of what a rank holds", partial(_heads, cp=4), hidden=True, points=2, accept=[
            sends("all_to_all", times=2, at_most=("x and y", lambda i: 2 * i[0]["x"].nbytes))], errors=dict.fromkeys(
                ("deadlock", "in->size % context->size"),  # as many numbers as the world can divide, or not
                "All ranks of cp take part in each all-to-all, and no others of the world: each call names its group.",
            )),
    ],
    idea="Write down the order in which the chunks arrive, rank by rank, and the order in which attention wants them.",
    hint="all_to_all_single cuts dim 0, the heads, into C. View what arrives as [C, a/C, 2, n/2, d]: the early chunks "
    "in rank order, then the late ones in reverse. The way back is the mirror image.",
)  # fmt: skip
