"""Lab 04, what is computed before anything runs: bytes, who holds which tokens and so works how much, five questions.

C ranks share a sequence. Zigzag: rank r holds chunks r and 2C-1-r of 2C, one early and one late, so that under a causal
mask all work the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

# -------------------------------------------------------------------------------------------------- predictions


def bytes_per_layer(s: int, b: int, heads: int, groups: int, d: int, cp: int, element_size: int) -> dict[str, float]:
    n = s // cp
    ring = 2 * (cp - 1) * n * b * groups * d * element_size
    ulysses = (cp - 1) / cp * n * b * (2 * heads + 2 * groups) * d * element_size
    return {"ring": ring, "ulysses": ulysses}


def _ring(nbytes: Callable[..., float]) -> Callable[..., dict[str, float]]:
    return instead(bytes_per_layer, ring=nbytes)


def _ulysses(nbytes: Callable[..., float]) -> Callable[..., dict[str, float]]:
    return instead(bytes_per_layer, ulysses=nbytes)


def _layer(draw: Draw) -> dict[str, Any]:
    cp, per = draw.choice([2, 4, 8]), draw.integer(2, 4)
    groups = cp * draw.integer(1, 3)
    return {
        "s": 1024 * cp * draw.integer(1, 8), "b": draw.integer(2, 3), "heads": groups * per, "groups": groups,
        "d": 32 * draw.integer(1, 4), "cp": cp, "element_size": draw.choice([1, 4]),
    }  # fmt: skip


_THREE = {"s": 48, "b": 3, "heads": 18, "groups": 6, "d": 10, "cp": 3, "element_size": 1}
_SMALL = {"s": 16, "b": 3, "heads": 20, "groups": 4, "d": 2, "cp": 4, "element_size": 4}

BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        # One rank sends nothing: no row of its own, or a constant would have its points.
        Case("3 sequences of 16 tokens on 4 ranks; on one rank", _SMALL, points=2, fixed=[{**_SMALL, "cp": 1}]),
        Case("other layers", _layer, points=2, hidden=True, fixed=[_THREE]),
    ],
    mistakes=[
        Mistake(
            lambda cp, **i: {way: cp * sent for way, sent in bytes_per_layer(cp=cp, **i).items()},
            "That is what all ranks send together; asked is one rank.",
        ),
        Mistake(_ring(lambda **i: bytes_per_layer(**i)["ring"] / 2), "Keys *and* values travel: two tensors a step, "
                "both whole, as the mask saves no bytes."),
        Mistake(_ring(lambda cp, **i: cp * bytes_per_layer(cp=cp, **i)["ring"]), "A block is what one rank holds: s/C "
                "tokens."),
        Mistake(_ring(lambda heads, groups, **i: (heads + 2 * groups) / (2 * groups) * bytes_per_layer(
            heads=heads, groups=groups, **i)["ring"]), "Queries stay where they are: only K and V go round."),
        Mistake(lambda heads, groups, **i: bytes_per_layer(heads=heads, groups=heads, **i), "Keys and values have "
                "`groups` heads, not `heads`, in both numbers."),
        Mistake(lambda b, **i: bytes_per_layer(b=1, **i), "That is for one sequence; here are b."),
        Mistake(lambda element_size, **i: bytes_per_layer(element_size=1, **i), "That is how many elements are sent; "
                "each has `element_size` bytes."),
        Mistake(lambda element_size, **i: bytes_per_layer(element_size=2, **i), "An element has `element_size` bytes, "
                "not always 2."),
        Mistake(_ulysses(lambda heads, groups, **i: bytes_per_layer(heads=heads, groups=heads, **i)["ulysses"]),
                "In Ulysses, too, keys and values have `groups` heads."),
        Mistake(_ulysses(lambda cp, **i: cp * bytes_per_layer(cp=cp, **i)["ulysses"]), "Each of the C-1 others gets a "
                "C-th of what this rank holds."),
        Mistake(_ulysses(lambda heads, groups, **i: heads / (heads + groups) * bytes_per_layer(
            heads=heads, groups=groups, **i)["ulysses"]), "Keys and values are exchanged, too, not only queries and "
                "output."),
        Mistake(_ulysses(lambda heads, groups, **i: (heads + 3 * groups) / (2 * heads + 2 * groups) * bytes_per_layer(
            heads=heads, groups=groups, **i)["ulysses"]), "The output has `heads` heads, as the queries have."),
        Mistake(
            _ring(lambda s, b, heads, d, cp, element_size, **_: 2 * (cp - 1) * s // cp * b * heads * d * element_size),
            "Keys and values have `groups` heads, not `heads`.",
        ),
        Mistake(
            _ring(lambda s, b, groups, d, element_size, **_: 2 * s * b * groups * d * element_size),
            "A block visits C ranks and is already on one of them: C-1 steps.",
        ),
        Mistake(
            _ulysses(lambda s, b, heads, groups, d, cp, element_size: s // cp * b * (2 * heads + 2 * groups) * d
                     * element_size),
            "In an all-to-all a rank keeps its own share: (C-1)/C of what it holds leaves.",
        ),
        Mistake(
            _ulysses(lambda s, b, heads, groups, d, cp, element_size: (cp - 1) / cp * (s // cp) * b
                     * (heads + 2 * groups) * d * element_size),
            "Queries, keys, values go out, and the *output* comes back: another all-to-all of `heads` heads.",
        ),
    ],
    idea="Follow one tensor: how many of its numbers leave this rank, and how often?",
    hint="n = s/C tokens. Ring: C-1 steps, each K and V, n*b*groups*d elements. Ulysses: (C-1)/C of q, k, v and the "
    "output, n*b*(2*heads + 2*groups)*d elements.",
)  # fmt: skip


def _chunks(s: int, cp: int, *which: int) -> list[int]:
    chunks = torch.arange(s).view(2 * cp, -1)
    return torch.cat([chunks[i] for i in which]).tolist()


def work(s: int, cp: int, zigzag: bool) -> list[int]:
    return [int((positions(s, cp, r, zigzag) + 1).sum()) for r in range(cp)]


def _work_inputs(draw: Draw) -> dict[str, Any]:
    cp = draw.integer(2, 6)
    return {"s": 2 * cp * draw.integer(2, 40), "cp": cp, "zigzag": bool(draw.integer(0, 1))}


def _zigzag_work(draw: Draw) -> dict[str, Any]:
    return {**_work_inputs(draw), "zigzag": True}


WORK = Exercise(
    "work",
    reference=work,
    cases=[
        Case("8 tokens on 2 ranks, contiguous", {"s": 8, "cp": 2, "zigzag": False}),
        Case("8 tokens on 2 ranks, zigzag", {"s": 8, "cp": 2, "zigzag": True}),
        Case(
            "other sizes",
            _work_inputs,
            hidden=True,
            fixed=[
                {"s": 36, "cp": 3, "zigzag": False},
                {"s": 36, "cp": 3, "zigzag": True},
                {"s": 15, "cp": 5, "zigzag": False},
                {"s": 7, "cp": 1, "zigzag": False},
            ],  # no two equal chunks
        ),
        Case(
            "zigzag, other sizes",
            _zigzag_work,
            hidden=True,
            fixed=[{"s": 10, "cp": 5, "zigzag": True}, {"s": 6, "cp": 1, "zigzag": True}],
        ),
    ],
    mistakes=[
        Mistake(
            lambda s, cp, zigzag: [int(positions(s, cp, r, zigzag).sum()) for r in range(cp)],
            "A token also sees itself: the token at place i sees i+1 keys.",
        ),
        Mistake(lambda s, cp, zigzag: work(s, cp, False), "With zigzag rank r holds chunks r and 2C-1-r of 2C."),
        Mistake(
            lambda s, cp, zigzag: [s // cp * s] * cp, "The mask is causal: a token sees nothing that comes after it."
        ),
        Mistake(
            lambda s, cp, zigzag: [s // cp * (s // cp + 1) // 2] * cp,
            "These are pairs with the rank's own keys alone: a query sees the keys of earlier tokens on all ranks.",
        ),
        Mistake(
            lambda s, cp, zigzag: [sum(s - i for i in positions(s, cp, r, zigzag).tolist()) for r in range(cp)],
            "That is how many queries see each rank's keys. Asked is how many keys each rank's queries see.",
        ),
        Mistake(
            lambda s, cp, zigzag: [
                sum(range(r + 1, s + 1, cp)) if zigzag else one for r, one in enumerate(work(s, cp, False))
            ],
            "Your zigzag deals tokens one by one to the ranks. It cuts the sequence into 2C chunks.",
        ),
        Mistake(
            lambda s, cp, zigzag: [
                sum(places) + len(places)
                for r in range(cp)
                for places in [_chunks(s, cp, r, cp + r) if zigzag else positions(s, cp, r, False).tolist()]
            ],
            "The second chunk of rank r is counted from the end, 2C-1-r.",
        ),
    ],
    idea="How many keys does the token at place i see, and which places does a rank hold?",
    hint="The token at place i sees i+1 keys. Add that up over the tokens that a rank holds.",
)

# ---------------------------------------------------------------------------------------------------- positions


def positions(s: int, cp: int, rank: int, zigzag: bool = True) -> torch.Tensor:
    if not zigzag:
        return torch.arange(s).chunk(cp)[rank]
    chunks = torch.arange(s).view(2 * cp, -1)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))


def _a_rank(draw: Draw) -> dict[str, Any]:
    cp = draw.integer(2, 6)
    return {"s": 2 * cp * draw.integer(2, 8), "cp": cp, "rank": draw.integer(0, cp - 1)}


def _last_rank(draw: Draw) -> dict[str, Any]:
    inputs = _a_rank(draw)
    return {**inputs, "rank": inputs["cp"] - 1}


POSITIONS = Exercise(
    "positions",
    reference=positions,
    cases=[
        Case("16 tokens, rank 1 of 4", {"s": 16, "cp": 4, "rank": 1}),
        Case("any rank", _a_rank, points=2, hidden=True, fixed=[
            {"s": 30, "cp": 3, "rank": 0}, {"s": 30, "cp": 3, "rank": 1}, {"s": 8, "cp": 4, "rank": 2}]),
        Case("the last rank", _last_rank, hidden=True, fixed=[{"s": 30, "cp": 5, "rank": 4}]),
    ],
    mistakes=[
        Mistake(lambda s, cp, rank: positions(s, cp, rank, False), "This is the contiguous cut: the last rank works "
                "most. Rank r holds chunks r and 2C-1-r of 2C."),
        Mistake(lambda s, cp, rank: torch.arange(s // cp), "These are places on the rank. RoPE and the mask need "
                "places in the *whole* sequence."),
        Mistake(lambda s, cp, rank: torch.arange(rank, s, cp), "Striped, token by token, is balanced too, nearly. "
                "Here the cut is in 2C chunks."),
        Mistake(lambda s, cp, rank: positions(s, cp, rank).view(2, -1).flip(0).flatten(), "The early chunk comes "
                "first, so that places ascend."),
        Mistake(lambda s, cp, rank: torch.tensor(_chunks(s, cp, rank, cp + rank)), "The late chunk is counted from the "
                "end: rank 0 has the first chunk and the last."),
        Mistake(lambda s, cp, rank: torch.cat((positions(s, cp, rank)[: s // cp // 2], positions(s, cp, rank)[
            s // cp // 2 :].flip(0))), "The late chunk stands backwards: places ascend in it, too."),
        Mistake(lambda s, cp, rank: torch.arange(s).view(-1, 2 * cp)[:, [rank, 2 * cp - 1 - rank]].flatten(), "That is "
                "zigzag token by token, there and back. Here the cut is in 2C chunks."),
    ],
    idea="Rank r holds the r-th chunk from the beginning and the r-th from the end.",
    hint="Cut 0 .. s-1 into 2C equal chunks; concatenate chunk r and chunk 2C-1-r.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    s: int, cp: int, tp: int, heads: int, groups: int, element_size: int, flops: float, bandwidth: float
) -> dict[str, Any]:
    return {
        "slowest_over_mean": (2 * cp - 1) / cp,  # where s is long; for any s here within rtol
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


def _machine(draw: Draw) -> dict[str, Any]:
    tp, cp = draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    groups = tp * draw.integer(1, 8)
    return {
        "s": 1024 * cp * draw.integer(1, 16), "cp": cp, "tp": tp, "heads": groups * draw.integer(1, 8),
        "groups": groups, "element_size": draw.choice([1, 2]), "flops": 1e14 * draw.integer(1, 9),
        "bandwidth": 1e10 * draw.integer(2, 40),
    }  # fmt: skip


_LLAMA = {
    "s": 131072, "cp": 16, "tp": 4, "heads": 64, "groups": 8, "element_size": 2, "flops": 1e14, "bandwidth": 3e11,
}  # fmt: skip

_LAPTOPS = {
    "s": 12288, "cp": 3, "tp": 2, "heads": 40, "groups": 10, "element_size": 1, "flops": 3e12, "bandwidth": 1e9,
}  # fmt: skip

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("Llama-3 70B, 128 k tokens, cp 16, tp 4, 100 TFLOP/s, 300 GB/s", _LLAMA),
        Case("another machine", _machine, points=3, hidden=True, fixed=[_LAPTOPS]),
    ],
    rtol=1e-3,
    mistakes=[
        Mistake(instead(answers, tokens_to_hide=lambda element_size, **i: answers(element_size=2, **i)[
            "tokens_to_hide"]), "An element has `element_size` bytes, not always 2."),
        Mistake(
            instead(answers, tokens_to_hide=lambda **i: answers(**i)["tokens_to_hide"] / 2),
            "That is half of it: at a step half of a block's pairs are visible, and both K and V travel.",
        ),
        Mistake(
            instead(answers, tokens_to_hide=lambda **i: 2 * answers(**i)["tokens_to_hide"]),
            "A step computes twice as much as you count: two products, and two operations for a multiply-add.",
        ),
        Mistake(
            instead(answers, tokens_to_hide=lambda element_size, flops, bandwidth, **_: element_size * flops
                    / bandwidth),
            "Keys and values have `groups` heads, the work has `heads`.",
        ),
        *(
            Mistake(instead(answers, tokens_to_hide=lambda to_whole=to_whole, **i: to_whole(
                answers(**i)["tokens_to_hide"])), "tokens_to_hide is asked for not rounded.")
            for to_whole in (math.ceil, math.floor)
        ),
        *(
            Mistake(instead(answers, tokens_to_hide=lambda tp, up=up, **i: answers(tp=tp, **i)["tokens_to_hide"]
                            * float(tp) ** up), "tp cuts the work and the messages alike: tokens_to_hide is the same "
                    "for every tp.")
            for up in (1, -1)
        ),
        *(
            Mistake(instead(answers, tokens_to_hide=lambda cp, by=by, **i: answers(cp=cp, **i)["tokens_to_hide"]
                            * by(cp)), "One step is compared with one block: the number of ranks is not in "
                    "tokens_to_hide.")
            for by in (float, lambda cp: cp - 1, lambda cp: (cp - 1) / cp, lambda cp: 1 / cp, lambda cp: cp / (cp - 1))
        ),
        *(
            Mistake(instead(answers, sequence_multiple=too_small),
                    "Sequence parallelism cuts each of the 2C chunks again, over tp.")
            for too_small in (lambda cp, **_: 2 * cp, lambda cp, tp, **_: cp * tp,
                              lambda cp, tp, **_: math.lcm(2 * cp, cp * tp))
        ),
        Mistake(instead(answers, largest_ulysses=lambda heads, tp, **_: heads // tp), "Keys and values have fewer "
                "heads than queries; without copies the *groups* of a tp rank are what can be divided."),
        Mistake(instead(answers, largest_ulysses=lambda groups, **_: groups), "tp has already divided the groups: "
                "Ulysses can only divide the part that a tp rank has."),
        *(
            Mistake(instead(answers, largest_ulysses=bound), "largest_ulysses is the largest cp that is possible, "
                    "whatever cp is now.")
            for bound in (lambda cp, **_: cp, lambda cp, tp, groups, **_: min(cp, groups // tp),
                          lambda cp, tp, groups, **_: groups // (cp * tp))
        ),
        Mistake(instead(answers, ring_over_ulysses=lambda cp, **_: cp), "Ulysses moves q, k, v and the output: 2 heads "
                "+ 2 groups, the ring 2 groups."),
        Mistake(instead(answers, ring_over_ulysses=lambda **i: 1 / answers(**i)["ring_over_ulysses"]),
                "That is Ulysses over the ring; asked is the ring over Ulysses."),
        Mistake(instead(answers, ring_over_ulysses=lambda cp, **_: cp / 2), "Keys and values have `groups` heads, "
                "queries and the output have `heads`."),
        Mistake(instead(answers, ring_over_ulysses=lambda cp, heads, groups, **_: 2 * cp * groups
                        / (heads + 2 * groups)), "In Ulysses the output is exchanged, too: 2 heads + 2 groups."),
        Mistake(instead(answers, ring_over_ulysses=lambda cp, heads, groups, **_: (cp - 1) * groups
                        / (heads + groups)), "In an all-to-all a rank keeps its own share: (C-1)/C leaves, as in "
                "`bytes_per_layer`."),
        Mistake(instead(answers, slowest_over_mean=lambda cp, **_: 2 * cp - 1), "That is the slowest over the fastest "
                "rank; asked is the slowest over the mean."),
        Mistake(instead(answers, slowest_over_mean=lambda **_: 1), "That is zigzag; asked is the contiguous cut."),
        Mistake(instead(answers, slowest_over_mean=lambda cp, **_: cp), "The last of C contiguous pieces has "
                "(2C-1)/C^2 of the pairs, the mean is 1/C."),
    ],
    idea="Each number is a ratio of two things that you have counted above: pairs, bytes, or seconds.",
    hint="Contiguous: rank C-1 has (2C-1)/C^2 of all pairs. Bytes as in your first exercise. A step computes "
    "2 n^2 heads d operations while 2 n groups d elements travel.",
)  # fmt: skip
