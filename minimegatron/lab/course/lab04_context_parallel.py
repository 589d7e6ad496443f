"""Checks of lab 04: bytes and work, attention in pieces, the zigzag cut, a ring both ways, heads for tokens.

Tensors have no batch dim: q is [a, n, d], a heads, n tokens, d wide. Who sees whom follows from places in the sequence:
a query at place i sees a key at place j when j <= i. So one function serves every cut of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.lab.checks import at_most, busy_during, count, no_tensor_above, only
from minimegatron.lab.exercises import Answer, Case, Draw, Exercise, Lab, Mistake

Inputs = list[dict[str, Any]]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# ------------------------------------------------------------------------------------------------ 1 predictions


def bytes_per_layer(s: int, b: int, heads: int, groups: int, d: int, cp: int, element_size: int) -> dict[str, float]:
    n = s // cp
    ring = 2 * (cp - 1) * n * b * groups * d * element_size
    ulysses = (cp - 1) / cp * n * b * (2 * heads + 2 * groups) * d * element_size
    return {"ring": ring, "ulysses": ulysses}


def _bytes(**wrong: Callable[..., float]) -> Callable[..., dict[str, float]]:
    def answer(**inputs: Any) -> dict[str, float]:
        return {**bytes_per_layer(**inputs), **{key: one(**inputs) for key, one in wrong.items()}}

    return answer


def _layer(draw: Draw) -> dict[str, Any]:
    cp, per = draw.choice([2, 4, 8]), draw.integer(1, 4)
    groups = cp * draw.integer(1, 3)
    return {
        "s": 1024 * cp * draw.integer(1, 8), "b": draw.integer(1, 3), "heads": groups * per, "groups": groups,
        "d": 32 * draw.integer(1, 4), "cp": cp, "element_size": draw.choice([2, 4]),
    }  # fmt: skip


_SMALL = {"s": 16, "b": 1, "heads": 8, "groups": 4, "d": 2, "cp": 4, "element_size": 2}

_BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        Case("16 tokens on 4 ranks", _SMALL),
        Case("one rank sends nothing", {**_SMALL, "cp": 1}),
        Case("other layers", _layer, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            _bytes(ring=lambda **i: bytes_per_layer(**i)["ring"] / 2), "Keys *and* values travel: two tensors a step."
        ),
        Mistake(
            _bytes(ring=lambda s, b, heads, d, cp, element_size, **_: 2 * (cp - 1) * s // cp * b * heads * d
                   * element_size),
            "Keys and values have `groups` heads, not `heads`.",
        ),
        Mistake(
            _bytes(ring=lambda s, b, groups, d, cp, element_size, **_: 2 * s * b * groups * d * element_size),
            "A block visits C ranks and is already on one of them: C-1 steps.",
        ),
        Mistake(
            _bytes(ulysses=lambda s, b, heads, groups, d, cp, element_size: s // cp * b * (2 * heads + 2 * groups) * d
                   * element_size),
            "In an all-to-all a rank keeps its own share: (C-1)/C of what it holds leaves.",
        ),
        Mistake(
            _bytes(ulysses=lambda s, b, heads, groups, d, cp, element_size: (cp - 1) / cp * (s // cp) * b
                   * (heads + 2 * groups) * d * element_size),
            "Queries, keys, values go out, and the *output* comes back: another all-to-all of `heads` heads.",
        ),
    ],
    hint="n = s/C tokens. Ring: C-1 steps, each K and V, n*b*groups*d elements. Ulysses: (C-1)/C of q, k, v and the "
    "output, n*b*(2*heads + 2*groups)*d elements.",
)  # fmt: skip


def work(s: int, cp: int, zigzag: bool) -> list[int]:
    return [int((positions(s, cp, r, zigzag) + 1).sum()) for r in range(cp)]


def _work_inputs(draw: Draw) -> dict[str, Any]:
    cp = draw.integer(2, 6)
    return {"s": 2 * cp * draw.integer(2, 40), "cp": cp, "zigzag": bool(draw.integer(0, 1))}


def _zigzag_work(draw: Draw) -> dict[str, Any]:
    return {**_work_inputs(draw), "zigzag": True}


_WORK = Exercise(
    "work",
    reference=work,
    cases=[
        Case("8 tokens on 2 ranks, contiguous", {"s": 8, "cp": 2, "zigzag": False}),
        Case("8 tokens on 2 ranks, zigzag", {"s": 8, "cp": 2, "zigzag": True}),
        Case("other sizes", _work_inputs, hidden=True),
        Case("zigzag, other sizes", _zigzag_work, hidden=True),
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
    ],
    hint="The token at place i sees i+1 keys. Add that up over the tokens that a rank holds.",
)

# -------------------------------------------------------------------------------------- attention by the formula


def _scores(q: torch.Tensor, k: torch.Tensor, q_at: Any, k_at: Any, scaled: bool = True, causal: bool = True) -> Any:
    s = q @ k.mT / (math.sqrt(q.shape[-1]) if scaled else 1.0)
    return s.masked_fill(q_at[:, None] < k_at[None, :], -torch.inf) if causal else s


def _dense(q: Any, k: Any, v: Any, q_at: Any, k_at: Any, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, cast back; a query that sees nothing has out 0 and lse -inf."""
    s = _scores(q.double(), k.double(), q_at, k_at, **how)
    lse = s.logsumexp(-1)
    out = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)) @ v.double()
    return out.to(q.dtype), lse.to(q.dtype)


def _attention_inputs(draw: Draw, a: int, n: int, m: int, d: int, block: int) -> dict[str, Any]:
    order = torch.randperm(n + m, generator=draw.generator)
    k_at = order[:m].clone()
    k_at[0] = 0  # everybody sees something
    return {
        "q": draw.tensor(a, n, d), "k": draw.tensor(a, m, d), "v": draw.tensor(a, m, d),
        "q_at": order[m:].clone() + 1, "k_at": k_at, "block": block,
    }  # fmt: skip


def _any_pieces(draw: Draw) -> dict[str, Any]:
    block = draw.integer(2, 5)
    sizes = draw.integer(1, 3), draw.integer(3, 9), block * draw.integer(2, 4) + draw.integer(0, 1), draw.integer(2, 6)
    return _attention_inputs(draw, *sizes, block)


def _large_scores(draw: Draw) -> dict[str, Any]:
    inputs = _any_pieces(draw)
    inputs["q"] = inputs["q"] * 300
    return inputs


def _sees_nothing(draw: Draw) -> dict[str, Any]:
    inputs = _any_pieces(draw)
    m = inputs["k"].shape[1]
    inputs["k_at"] = torch.arange(m) + 10
    inputs["q_at"] = torch.arange(inputs["q"].shape[1]) + 8  # the first two see no key
    return inputs


def _long(draw: Draw) -> dict[str, Any]:
    inputs = _attention_inputs(draw, 2, 96, 128, 4, 8)
    return {**inputs, "q_at": torch.arange(128, 224), "k_at": torch.arange(128)}


def _half_hidden(draw: Draw) -> dict[str, Any]:
    block = draw.integer(3, 6)
    inputs = _attention_inputs(draw, 2, 2 * block, 4 * block, 4, block)
    return {**inputs, "q_at": torch.arange(2 * block), "k_at": torch.arange(4 * block)}


def _plain_exp(q: Any, k: Any, v: Any, q_at: Any, k_at: Any, block: int) -> Any:
    p = torch.exp(_scores(q, k, q_at, k_at))
    total = p.sum(-1, keepdim=True)
    return p @ v / total, total.log().squeeze(-1)


def _never_rescaled(q: Any, k: Any, v: Any, q_at: Any, k_at: Any, block: int) -> Any:
    s = _scores(q, k, q_at, k_at)
    top = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for part, values in zip(s.split(block, -1), v.split(block, 1), strict=True):
        top = torch.maximum(top, part.amax(-1, keepdim=True))
        p = torch.exp(part - top.masked_fill(top == -torch.inf, 0.0))
        total, out = total + p.sum(-1, keepdim=True), out + p @ values
    return out / total, (top + total.log()).squeeze(-1)


def _nothing_is_nan(block: int, **inputs: Any) -> Any:
    out, lse = _dense(**inputs)
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), torch.nan), lse


def _products(answer: Answer) -> list[int]:
    """Multiply-adds of each rank's matrix products."""
    return [sum(much for what, much in one.order if what == "matmul") for one in answer.evidence]


def _skips(answer: Answer) -> str | None:
    i = answer.inputs
    bound = 2 * i["q"].numel() * 2 * i["block"]  # Q K^T and P V over two blocks of four
    done = _products(answer)[0]
    return f"{done} multiply-adds; {bound} are enough, as two of the four blocks are hidden" if done > bound else None


_FIXED = {
    "q": torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), "k": torch.tensor([[[1.0, 1.0], [0.0, 1.0], [3.0, 0.0]]]),
    "v": torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]]), "q_at": torch.tensor([1, 2]),
    "k_at": torch.tensor([0, 1, 2]), "block": 1,
}  # fmt: skip

_ATTEND = Exercise(
    "attend",
    reference=lambda block, **inputs: _dense(**inputs),
    cases=[
        Case("two queries, three keys, blocks of one", _FIXED),
        Case("other sizes and places", _any_pieces, hidden=True),
        Case("scores in the hundreds", _large_scores, hidden=True),
        Case("queries that see nothing", _sees_nothing, hidden=True),
        Case("never the whole matrix of scores", _long, hidden=True, points=2, accept=[
            no_tensor_above("half of one head's scores", lambda i: 2 * i["q"].shape[1] * i["k"].shape[1])]),
        Case("a block that nobody sees is skipped", _half_hidden, hidden=True, accept=[_skips]),
    ],
    mistakes=[
        Mistake(lambda block, **i: _dense(**i, scaled=False), "The scores are divided by sqrt(d)."),
        Mistake(lambda block, **i: _dense(**i, causal=False), "A query at place i sees keys at places j <= i only."),
        Mistake(_nothing_is_nan, "A query that sees nothing: -inf minus -inf and 0 / 0 are no numbers. Its out is 0."),
        Mistake(_plain_exp, "exp of a large score overflows: subtract the running maximum first."),
        Mistake(_never_rescaled, "When the maximum grows, what was summed before shrinks by exp(m_old - m_new)."),
    ],
    hint="For each block of keys: scores/sqrt(d), -inf where k_at > q_at; m' = max(m, rowmax); shrink l and O by "
    "exp(m - m'), add exp(S - m'). At the end O / l and m + log l. -inf minus -inf is no number: where m' is "
    "-inf use 0. Skip a block whose first key comes after the last query.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ merge


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.logaddexp(lse.double(), more_lse.double())
    finite = total.masked_fill(total == -torch.inf, 0.0)
    a, b = (torch.exp(x.double() - finite).unsqueeze(-1) for x in (lse, more_lse))
    return (a * out + b * more).to(out.dtype), total.to(lse.dtype)


def _naive_merge(out: Any, lse: Any, more: Any, more_lse: Any) -> Any:
    a, b = lse.exp().unsqueeze(-1), more_lse.exp().unsqueeze(-1)
    return (a * out + b * more) / (a + b), (a + b).log().squeeze(-1)


def _nothing_merged(**pieces: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = merge(**pieces)
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), torch.nan), lse


def _halves(scale: float = 1.0) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        a, n, d = draw.integer(1, 3), draw.integer(2, 6), draw.integer(2, 4)
        return {
            "out": draw.tensor(a, n, d), "lse": scale * draw.tensor(a, n), "more": draw.tensor(a, n, d),
            "more_lse": scale * draw.tensor(a, n),
        }  # fmt: skip

    return inputs


def _nothing_yet(draw: Draw) -> dict[str, Any]:
    inputs = _halves()(draw)
    inputs["out"], inputs["lse"] = torch.zeros_like(inputs["out"]), torch.full_like(inputs["lse"], -torch.inf)
    inputs["more"][:, 0], inputs["more_lse"][:, 0] = 0.0, -torch.inf  # nothing in either
    return inputs


_EVEN = {
    "out": torch.tensor([[[1.0, 2.0]]]), "lse": torch.tensor([[0.0]]), "more": torch.tensor([[[3.0, 6.0]]]),
    "more_lse": torch.tensor([[math.log(3.0)]]),
}  # fmt: skip

_MERGE = Exercise(
    "merge",
    reference=merge,
    cases=[
        Case("sums of 1 and 3", _EVEN),
        Case("other pieces", _halves(), hidden=True),
        Case("an lse of a thousand", _halves(1000.0), hidden=True),
        Case("pieces that saw nothing", _nothing_yet, hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda out, lse, more, more_lse: ((out + more) / 2, merge(out, lse, more, more_lse)[1]),
            "This is the average. Each piece counts with its share of the whole sum, exp(lse - lse_new).",
        ),
        Mistake(
            lambda out, lse, more, more_lse: (out + more, merge(out, lse, more, more_lse)[1]),
            "Each piece is already divided by its own sum; weigh it with exp(lse - lse_new).",
        ),
        Mistake(
            _nothing_merged,
            "Where neither has seen anything, -inf minus -inf is no number: take 0 in its place, so that out stays 0.",
        ),
        Mistake(_naive_merge, "exp(lse) overflows. Use differences: torch.logaddexp, then exp(lse - lse_new)."),
        Mistake(
            lambda out, lse, more, more_lse: (merge(out, lse, more, more_lse)[0], lse + more_lse),
            "The sums add, not their logarithms: lse_new = log(exp(lse) + exp(more_lse)).",
        ),
    ],
    hint="lse_new = logaddexp(lse, more_lse); out = exp(lse - lse_new) out + exp(more_lse - lse_new) more. Where "
    "lse_new is -inf nothing was seen: take 0 in its place before you subtract.",
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


_POSITIONS = Exercise(
    "positions",
    reference=positions,
    cases=[
        Case("16 tokens, rank 1 of 4", {"s": 16, "cp": 4, "rank": 1}),
        Case("any rank", _a_rank, points=2, hidden=True),
        Case("the last rank", _last_rank, hidden=True),
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
    ],
    hint="Cut 0 .. s-1 into 2C equal chunks; concatenate chunk r and chunk 2C-1-r.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ ring, forward


def _drive_ring(exercise: Any, q: Any, k: Any, v: Any, at: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    cp = Axis("cp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    out, lse = exercise.ring_forward(q, k, v, list(at), cp)
    return {"out": out, "lse": lse}


def _joined(ranks: Inputs, name: str) -> torch.Tensor:
    return torch.cat([r[name] for r in ranks], 1)


def _ring(ranks: Inputs, **how: bool) -> list[dict[str, torch.Tensor]]:
    k, v, k_at = _joined(ranks, "k"), _joined(ranks, "v"), torch.cat(ranks[0]["at"])
    both = [_dense(r["q"], k, v, r["at"][i], k_at, **how) for i, r in enumerate(ranks)]
    return [{"out": out, "lse": lse} for out, lse in both]


def _pieces_of(ranks: Inputs, rank: int, sees: Callable[[int, int], bool]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine = ranks[rank]
    owners = [j for j in range(len(ranks)) if sees(rank, j)]
    return [_dense(mine["q"], ranks[j]["k"], ranks[j]["v"], mine["at"][rank], mine["at"][j]) for j in owners]


def _some_blocks(sees: Callable[[int, int], bool], average: bool = False) -> Callable[[Inputs], Any]:
    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        results = []
        for rank, right in enumerate(_ring(ranks)):
            pieces = _pieces_of(ranks, rank, sees)
            out, lse = pieces[0]
            for piece in pieces[1:]:
                out, lse = merge(out, lse, *piece)
            if average:
                out, lse = torch.stack([p[0] for p in pieces]).mean(0), right["lse"]
            results.append({"out": out, "lse": lse})
        return results

    return answer


def _local_places(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    here = torch.arange(ranks[0]["q"].shape[1])
    return _some_blocks(lambda r, j: True)([{**r, "at": [here] * len(ranks)} for r in ranks])


def _stuck(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """The rank's own block at every step, with the places of the others."""
    out = []
    for rank, mine in enumerate(ranks):
        always = [{**r, "q": mine["q"], "k": mine["k"], "v": mine["v"]} for r in ranks]
        out.append(_some_blocks(lambda r, j: True)(always)[rank])
    return out


def _ring_inputs(draw: Draw, cp: int = 0) -> Inputs:
    cp = cp or draw.integer(2, 4)
    a, n, d = draw.integer(1, 3), 2 * draw.integer(2, 4), draw.integer(2, 6)
    at = [positions(n * cp, cp, r) for r in range(cp)]
    return [{**{name: draw.tensor(a, n, d) for name in "qkv"}, "at": [t.clone() for t in at]} for _ in range(cp)]


def _two(draw: Draw) -> Inputs:
    return _ring_inputs(draw, 2)


def _four(draw: Draw) -> Inputs:
    return _ring_inputs(draw, 4)


def _kv_bytes(inputs: Inputs) -> int:
    return int(2 * inputs[0]["k"].nbytes)


def _neighbours(answer: Answer) -> str | None:
    size = len(answer.evidence)
    for rank, one in enumerate(answer.evidence):
        if strangers := {call.peer for call in one.calls if call.name == "send"} - {(rank + 1) % size}:
            return f"rank {rank} sends to {sorted(strangers)}; in a ring it sends to the next rank only"
    return None


def _hidden_skipped(answer: Answer) -> str | None:
    q, size = answer.inputs[0]["q"], len(answer.inputs)
    bound = 2 * q.numel() * q.shape[1] * (size + 1) // 2  # the own block, and half of each other
    for rank, done in enumerate(_products(answer)):
        if done > bound:
            return f"rank {rank} does {done} multiply-adds; {bound} are enough without the hidden halves"
    return None


def _half_a_block_each(inputs: Inputs) -> float:
    q = inputs[0]["q"]
    return float((len(inputs) - 1) * q.numel() * q.shape[1])


_RING = Exercise(
    "ring_forward",
    reference=_ring,
    drive=_drive_ring,
    cases=[
        Case("2 ranks", _two, hidden=True),
        Case("up to 4 ranks", _ring_inputs, points=2, hidden=True),
        Case("K and V travel to the next rank, C-1 times", _four, hidden=True, accept=[
            only("send", "recv"), _neighbours, at_most("(C-1) blocks", lambda i: (len(i) - 1) * _kv_bytes(i), "send")]),
        Case("the next block travels while this one is used", _four, hidden=True, points=2, accept=[
            only("send", "recv"), busy_during("send", _half_a_block_each)]),
        Case("hidden halves are not computed", _four, hidden=True, accept=[_hidden_skipped]),
    ],
    mistakes=[
        Mistake(lambda ranks: _ring(ranks, scaled=False), "The scores are divided by sqrt(d)."),
        Mistake(lambda ranks: _ring(ranks, causal=False), "A query at place i sees keys at places j <= i only."),
        Mistake(_some_blocks(lambda r, j: r == j), "That is this rank's own block alone. All blocks must come by."),
        Mistake(_some_blocks(lambda r, j: True, average=True), "Pieces are not averaged: merge them by their lse."),
        Mistake(
            _some_blocks(lambda r, j: j <= r),
            "Blocks of later ranks are not hidden: with zigzag your late half sees all of them.",
        ),
        Mistake(_stuck, "The same keys and values at every step: go on with what `wait()` returns."),
        Mistake(_local_places, "The mask needs places in the whole sequence: at[cp.rank] and at[owner]."),
    ],
    hint="At step i the block of rank (r - i) mod C is here. Start its journey to the next rank first, attend with "
    "each half of q, merge, then wait. Start with out 0 and lse -inf.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ a piece, back


def piece_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, q_at: Any, k_at: Any, *, delta: bool = True,
    scaled: bool = True, own_lse: bool = False,
) -> Triple:  # fmt: skip
    """By the formula in float64, cast back."""
    of, (dout, q, k, v, out, lse) = q.dtype, (t.double() for t in (dout, q, k, v, out, lse))
    s = _scores(q, k, q_at, k_at)
    row = s.logsumexp(-1) if own_lse else lse
    p = torch.exp(s - row.masked_fill(row == -torch.inf, torch.inf).unsqueeze(-1))
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True) * delta)
    ds = ds / math.sqrt(q.shape[-1]) if scaled else ds
    return (ds @ k).to(of), (ds.mT @ q).to(of), (p.mT @ dout).to(of)


def _piece_inputs(draw: Draw) -> dict[str, Any]:
    """Some of the keys of an attention, with the output and lse of all of them."""
    a, n, m, d = draw.integer(1, 3), draw.integer(3, 6), draw.integer(6, 9), draw.integer(2, 5)
    q, k, v, dout = (draw.tensor(a, size, d) for size in (n, m, m, n))
    q_at, k_at = torch.arange(m - n, m) + 1, torch.arange(m)
    out, lse = _dense(q, k, v, q_at, k_at)
    keys = slice(m // 3, None)
    return {
        "dout": dout, "q": q, "k": k[:, keys].clone(), "v": v[:, keys].clone(), "out": out, "lse": lse, "q_at": q_at,
        "k_at": k_at[keys].clone(),
    }  # fmt: skip


def _all_keys(draw: Draw) -> dict[str, Any]:
    a, n, d = draw.integer(1, 3), draw.integer(3, 6), draw.integer(2, 5)
    q, k, v, dout = (draw.tensor(a, n, d) for _ in range(4))
    at = torch.arange(n)
    out, lse = _dense(q, k, v, at, at)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "q_at": at, "k_at": at.clone()}


_PIECE = Exercise(
    "piece_backward",
    reference=piece_backward,
    cases=[
        Case("all keys: the gradient of attention", _all_keys, hidden=True),
        Case("some of the keys: their terms of the sums", _piece_inputs, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(lambda **i: piece_backward(**i, delta=False),
                "Softmax's gradient is P (dP - D), D = rowsum(dout*out)."),
        Mistake(lambda **i: piece_backward(**i, scaled=False), "The scores were divided by sqrt(d); so are dS."),
        Mistake(
            lambda **i: piece_backward(**i, own_lse=True),
            "P = exp(S - lse) with the *final* lse, of all keys. The sum over this piece alone is too small.",
        ),
    ],
    hint="S = q k^T / sqrt(d), masked; P = exp(S - lse); dV = P^T dout; dP = dout v^T; "
    "dS = P (dP - rowsum(dout out)) / sqrt(d); dQ = dS k; dK = dS^T q.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------- ring, backward


def _drive_back(exercise: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, at: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    cp = Axis("cp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    dq, dk, dv = exercise.ring_backward(dout, q, k, v, out, lse, list(at), cp)
    return {"dq": dq, "dk": dk, "dv": dv}


def _ring_back(ranks: Inputs, stale: int = 0, **how: bool) -> list[dict[str, torch.Tensor]]:
    """`stale`: at a step each rank has the block of so many ranks further on."""
    size = len(ranks)
    dqs: list[Any] = [0.0] * size
    dkvs: list[Any] = [0.0] * size
    for r, mine in enumerate(ranks):
        for owner in range(size):
            block = ranks[(owner + stale) % size]
            rest = mine["out"], mine["lse"], mine["at"][r], mine["at"][owner]
            dq, dk, dv = piece_backward(mine["dout"], mine["q"], block["k"], block["v"], *rest, **how)
            dqs[r] = dqs[r] + dq
            dkvs[owner] = dkvs[owner] + torch.stack((dk, dv))
    return [{"dq": dq, "dk": dkv[0], "dv": dkv[1]} for dq, dkv in zip(dqs, dkvs, strict=True)]


def _own_part(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    answers = _ring_back(ranks)
    for r, mine in enumerate(ranks):
        _, dk, dv = piece_backward(
            mine["dout"], mine["q"], mine["k"], mine["v"], mine["out"], mine["lse"], mine["at"][r], mine["at"][r]
        )
        answers[r] = {"dq": answers[r]["dq"], "dk": dk, "dv": dv}
    return answers


def _not_home(by: int) -> Callable[[Inputs], list[dict[str, torch.Tensor]]]:
    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        right = _ring_back(ranks)
        others = [right[(r + by) % len(ranks)] for r in range(len(ranks))]
        return [{"dq": mine["dq"], "dk": o["dk"], "dv": o["dv"]} for mine, o in zip(right, others, strict=True)]

    return answer


def _last_part(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """What the last visitor computed comes home, without the others' parts."""
    right, size = _ring_back(ranks), len(ranks)
    out = []
    for r in range(size):
        last, mine = ranks[r - 1], ranks[r]
        rest = last["out"], last["lse"], last["at"][(r - 1) % size], last["at"][r]
        _, dk, dv = piece_backward(last["dout"], last["q"], mine["k"], mine["v"], *rest)
        out.append({"dq": right[r]["dq"], "dk": dk, "dv": dv})
    return out


def _back_inputs(draw: Draw, cp: int = 0) -> Inputs:
    ranks = _ring_inputs(draw, cp)
    for r, o in zip(ranks, _ring(ranks), strict=True):
        r.update(dout=draw.tensor(*r["q"].shape), **o)
    return ranks


def _back_two(draw: Draw) -> Inputs:
    return _back_inputs(draw, 2)


def _back_four(draw: Draw) -> Inputs:
    return _back_inputs(draw, 4)


_BACK = Exercise(
    "ring_backward",
    reference=_ring_back,
    drive=_drive_back,
    cases=[
        Case("2 ranks", _back_two, hidden=True),
        Case("up to 4 ranks", _back_inputs, points=2, hidden=True),
        Case("K, V and their gradients go round once, to the next rank", _back_four, hidden=True, points=2, accept=[
            only("send", "recv"), _neighbours,
            at_most("2C blocks", lambda i: 2 * len(i) * _kv_bytes(i), "send")]),
    ],
    mistakes=[
        Mistake(_own_part, "dK and dV hold only what your own queries add. Other ranks' queries saw your keys too: the "
                "gradient must travel with the block and collect their parts."),
        Mistake(_not_home(1), "Each rank returns the gradient of the next rank's block: one more hop brings it home."),
        Mistake(_not_home(-1), "Each rank returns the gradient of the block of the rank before: one hop too many."),
        Mistake(_last_part, "The gradient that arrives must be *added* to this rank's part before it travels on."),
        Mistake(lambda ranks: _ring_back(ranks, stale=1), "You use another rank's keys and values: at step i the block "
                "must be that of rank (r - i) mod C, at step 0 your own."),
        Mistake(lambda ranks: _ring_back(ranks, stale=-1), "You use another rank's keys and values: at step i the "
                "block must be that of rank (r - i) mod C, at step 0 your own."),
        Mistake(lambda ranks: _ring_back(ranks, own_lse=True), "Use the final lse, which is given."),
    ],
    hint="K, V go round as in the forward. At each step: piece_backward; add dq; add what has arrived from the rank "
    "before to this block's dK, dV and send the sum on. After C hops it is home.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- all-to-all


def _drive_ulysses(exercise: Any, x: Any, y: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    cp = Axis("cp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    return {"heads": exercise.heads_for_tokens(x, cp), "tokens": exercise.tokens_for_heads(y, cp)}


def _ulysses(ranks: Inputs, reorder: bool = True, order_back: bool = True) -> list[dict[str, torch.Tensor]]:
    size, n = len(ranks), ranks[0]["x"].shape[1]
    held = [positions(n * size, size, r) for r in range(size)]
    arrived = torch.cat([r["x"] for r in ranks], 1)
    ordered = arrived[:, torch.cat(held).argsort()] if reorder else arrived
    back = torch.cat([r["y"] for r in ranks], 0)
    cut = held if order_back else list(torch.arange(n * size).chunk(size))
    heads = ordered.chunk(size)
    return [{"heads": heads[r].clone(), "tokens": back[:, cut[r]]} for r in range(size)]


def _heads(draw: Draw, cp: int = 0) -> Inputs:
    cp = cp or draw.integer(2, 4)
    a, n, d = draw.integer(1, 2), 2 * draw.integer(1, 3), draw.integer(2, 4)
    return [{"x": draw.tensor(a * cp, n, d), "y": draw.tensor(a, n * cp, d)} for _ in range(cp)]


def _heads_four(draw: Draw) -> Inputs:
    return _heads(draw, 4)


def _heads_two(draw: Draw) -> Inputs:
    return _heads(draw, 2)


_ULYSSES = Exercise(
    "ulysses",
    reference=_ulysses,
    drive=_drive_ulysses,
    cases=[
        Case("2 ranks", _heads_two, hidden=True),
        Case("up to 4 ranks", _heads, points=2, hidden=True),
        Case("one all-to-all each way, of what a rank holds", _heads_four, hidden=True, points=2, accept=[
            only("all_to_all"), count("all_to_all", 2), at_most("x and y", lambda i: 2 * i[0]["x"].nbytes)]),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _ulysses(ranks, reorder=False, order_back=False),
            "The tokens arrive rank by rank, chunks 0, 2C-1, 1, 2C-2, ... Put them in the order of the sequence, and "
            "back on the way out.",
        ),
        Mistake(
            lambda ranks: _ulysses(ranks, reorder=False),
            "The tokens arrive rank by rank, chunks 0, 2C-1, 1, 2C-2, ... Put them in the order of the sequence.",
        ),
        Mistake(
            lambda ranks: _ulysses(ranks, order_back=False),
            "On the way back rank r gets chunks r and 2C-1-r, not a contiguous piece.",
        ),
    ],
    hint="all_to_all_single cuts dim 0, the heads, into C. View what arrives as [C, a/C, 2, n/2, d]: the early chunks "
    "in rank order, then the late ones in reverse. The way back is the mirror image.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------- whose block


def blocks_used(dqs: Any, dout: Any, q: Any, out: Any, lse: Any, ks: Any, vs: Any, at: Any, rank: int) -> list[int]:
    size, found = len(ks), []
    for step, got in enumerate(dqs):
        k_at = at[(rank - step) % size]
        tries = [piece_backward(dout, q, k, v, out, lse, at[rank], k_at)[0] for k, v in zip(ks, vs, strict=True)]
        found.append(min(range(size), key=lambda j: float((tries[j] - got).norm())))
    return found


def _case_of(order: Callable[[Draw, int, int], list[int]]) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        ranks = _back_inputs(draw, draw.integer(3, 4))
        size = len(ranks)
        rank = draw.integer(0, size - 1)
        mine, at = ranks[rank], ranks[rank]["at"]
        dqs = []
        for step, j in enumerate(order(draw, rank, size)):
            rest = mine["out"], mine["lse"], at[rank], at[(rank - step) % size]
            dqs.append(piece_backward(mine["dout"], mine["q"], ranks[j]["k"], ranks[j]["v"], *rest)[0])
        return {
            "dqs": dqs, **{n: mine[n] for n in ("dout", "q", "out", "lse")}, "ks": [r["k"] for r in ranks],
            "vs": [r["v"] for r in ranks], "at": at, "rank": rank,
        }  # fmt: skip

    return inputs


def _shuffled(draw: Draw, rank: int, size: int) -> list[int]:
    return draw.random.sample(range(size), size)


_USED = Exercise(
    "blocks_used",
    reference=blocks_used,
    cases=[
        Case("a ring that is right", _case_of(lambda draw, r, size: [(r - i) % size for i in range(size)])),
        Case("one that uses a single block", _case_of(lambda draw, r, size: [draw.integer(0, size - 1)] * size),
             hidden=True),
        Case("any blocks", _case_of(_shuffled), points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda dqs, rank, ks, **_: [(rank - i) % len(ks) for i in range(len(dqs))],
            "That is which blocks *should* be used. Find out which were.",
        ),
        Mistake(
            lambda dqs, rank, ks, **_: [(rank + 1 - i) % len(ks) for i in range(len(dqs))],
            "One shift explains one ring. Test every block at every step.",
        ),
    ],
    hint="At step i the mask is that of at[(rank - i) mod C]. Compute piece_backward with every block's keys and "
    "values and take the one whose dq equals dqs[i].",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- 9 questions


def answers(
    s: int, cp: int, tp: int, heads: int, groups: int, element_size: int, flops: float, bandwidth: float
) -> dict[str, Any]:
    return {
        "slowest_over_mean": (2 * cp - 1 + cp / s) / (cp + cp / s),
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


def _changed(**changes: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def answer(**inputs: Any) -> dict[str, Any]:
        return {**answers(**inputs), **{key: change(**inputs) for key, change in changes.items()}}

    return answer


def _machine(draw: Draw) -> dict[str, Any]:
    tp, cp = draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    groups = tp * draw.integer(1, 8)
    return {
        "s": 1024 * cp * draw.integer(1, 16), "cp": cp, "tp": tp, "heads": groups * draw.integer(1, 8),
        "groups": groups, "element_size": draw.choice([1, 2]), "flops": 1e14 * draw.integer(1, 9),
        "bandwidth": 1e10 * draw.integer(2, 40),
    }  # fmt: skip


_LLAMA = {
    "s": 131072, "cp": 8, "tp": 2, "heads": 32, "groups": 8, "element_size": 2, "flops": 4e14, "bandwidth": 5e10,
}  # fmt: skip

_QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("128 k tokens, heads and groups of Llama-3 8B, cp 8, tp 2", _LLAMA),
        Case("another machine", _machine, points=3, hidden=True),
    ],
    rtol=1e-3,
    mistakes=[
        Mistake(
            _changed(tokens_to_hide=lambda groups, element_size, flops, heads, bandwidth, **_: groups * element_size
                     * flops / (2 * heads * bandwidth)),
            "Half of the pairs are visible at a step: 2 n^2 heads d operations, not 4.",
        ),
        Mistake(
            _changed(tokens_to_hide=lambda element_size, flops, bandwidth, **_: element_size * flops / bandwidth),
            "Keys and values have `groups` heads, the work has `heads`.",
        ),
        Mistake(_changed(sequence_multiple=lambda cp, **_: 2 * cp), "Sequence parallelism cuts each rank's tokens "
                "again, over tp."),
        Mistake(_changed(largest_ulysses=lambda heads, tp, **_: heads // tp), "Keys and values have fewer heads than "
                "queries; without copies the *groups* of a tp rank are what can be shared."),
        Mistake(_changed(ring_over_ulysses=lambda cp, **_: cp), "Ulysses moves q, k, v and the output: 2 heads + 2 "
                "groups, the ring 2 groups."),
        Mistake(_changed(slowest_over_mean=lambda cp, **_: cp), "The last of C contiguous pieces has (2C-1)/C^2 of "
                "the pairs, the mean is 1/C."),
    ],
    hint="Contiguous: rank C-1 has (2C-1)/C^2 of all pairs. Bytes as in your first exercise. A step computes "
    "2 n^2 heads d operations while 2 n groups d elements travel.",
)  # fmt: skip

LAB = Lab(
    "04_context_parallel",
    [_WORK, _BYTES, _ATTEND, _MERGE, _POSITIONS, _RING, _PIECE, _BACK, _ULYSSES, _USED, _QUESTIONS],
)
