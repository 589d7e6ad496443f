"""Lab 02, heads over tp: which rows of the packed QKV matrix a rank holds, and attention between f and g.

The packed matrix stores, for each key/value group, its queries, its key and its value; so equal blocks of rows are
whole groups. `_heads` is attention by the formula, with what can go wrong as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import at_most, count, only
from labkit.compare import ANYTHING
from labkit.exercises import Case, Draw, Exercise, Mistake

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- the packed QKV


def qkv_part(wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """This rank's rows of the packed matrix: per key/value group its queries, its key, its value."""
    return _packed(wq, wk, wv, d).flatten(0, 1).chunk(tp_size)[tp_rank]


def _packed(wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int) -> torch.Tensor:
    """The packed matrix as [groups, rows of a group, h]."""
    return torch.cat([w.unflatten(0, (wk.shape[0] // d, -1)) for w in (wq, wk, wv)], 1)


def _key_for_each_query(
    wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int
) -> torch.Tensor:
    n = len(wq) // len(wk)
    k, v = (w.unflatten(0, (-1, d)).repeat_interleave(n, 0).flatten(0, 1) for w in (wk, wv))
    return qkv_part(wq, k, v, d, tp_rank, tp_size)


def _whole_groups(
    wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int
) -> torch.Tensor:
    """A mistaken part: each rank gets the same number of whole groups, at least one."""
    packed = _packed(wq, wk, wv, d)
    own = max(len(packed) // tp_size, 1)
    return packed[tp_rank * own : (tp_rank + 1) * own].flatten(0, 1)


def _queries_and_what_they_use(
    wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int
) -> torch.Tensor:
    """A mistaken part: the rank's queries, and the whole key and value of each of their groups."""
    own, n = len(wq) // d // tp_size, len(wq) // len(wk)
    queries, rows = range(tp_rank * own, (tp_rank + 1) * own), []
    for group in sorted({query // n for query in queries}):
        rows += [wq[q * d : (q + 1) * d] for q in queries if q // n == group]
        rows += [w[group * d : (group + 1) * d] for w in (wk, wv)]
    return torch.cat(rows)


def _rows_of_a_group_dealt(wq: torch.Tensor, wk: torch.Tensor, d: int) -> torch.Tensor:
    """A mistaken packing: row j of each query of a group, then row j + 1 of each."""
    return wq.unflatten(0, (len(wk) // d, d, -1)).transpose(1, 2).flatten(0, 2)


def _dealt(wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """A mistaken part: query head i belongs to group i modulo the number of groups."""
    dealt = wq.unflatten(0, (-1, wk.shape[0] // d, d)).transpose(0, 1).flatten(0, 2)
    return qkv_part(dealt, wk, wv, d, tp_rank, tp_size)


def _rows(a: int, g: int, t: int, rank: int) -> dict[str, Any]:
    """Heads of one row each, whose values name them: query 3 is 3, key 1 is 101, value 1 is 201."""
    starts = {"wq": (0, a), "wk": (100, g), "wv": (200, g)}
    weights = {n: torch.arange(float(start), start + size)[:, None] for n, (start, size) in starts.items()}
    return {**weights, "d": 1, "tp_rank": rank, "tp_size": t}


def _grouped(draw: Draw, t: int = 0, g: int = 0, n: int = 0) -> dict[str, Any]:
    """Draw `g` groups of `n` queries each; by default there are more groups than ranks."""
    t = t or draw.choice([2, 4])
    g, n = g or t * draw.integer(2, 3), n or draw.integer(2, 3)
    d, h = draw.shape(2, 2, 5)
    weights = {name: draw.tensor(heads * d, h) for name, heads in (("wq", g * n), ("wk", g), ("wv", g))}
    return {**weights, "d": d, "tp_rank": draw.integer(0, t - 1), "tp_size": t}


QKV = Exercise(
    "qkv_part",
    reference=qkv_part,
    cases=[
        Case("4 query heads, 2 groups, rank 1 of 2", _rows(4, 2, 2, 1)),
        Case("8 query heads, 4 groups, rank 0 of 2", _rows(8, 4, 2, 0)),
        Case("fewer groups than ranks: rank 1 of 4 with one group", _rows(6, 1, 4, 1)),
        Case(
            "other heads and ranks",
            _grouped,
            points=2,
            hidden=True,
            fixed=[
                partial(_grouped, t=3, g=3, n=1),
                partial(_grouped, t=4, g=2, n=4),
                partial(_grouped, t=2, g=6, n=3),
            ],
        ),
    ],
    mistakes=[
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: torch.cat([wq, wk, wv]).tensor_split(tp_size)[tp_rank],
            "An equal cut of the stack [Q; K; V] gives rank 0 nothing but queries.",
        ),
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: (
                _packed(wq, wk, wv, d).flatten(0, 1).tensor_split(tp_size, 1)[tp_rank]
            ),
            "You cut the columns: QKV is a column layer, which cuts the rows of the stored weight.",
        ),
        *(
            Mistake(
                wrong,
                "With fewer groups than ranks an equal block is a part of a group, whichever rows these are.",
            )
            for wrong in (_whole_groups, _queries_and_what_they_use)
        ),
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: _packed(wq, wk, wv, d).flatten(0, 1),
            "This is the whole packed matrix: of tp_size equal blocks a rank holds one.",
        ),
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: _packed(wq, wk, wv, d)[tp_rank::tp_size].flatten(0, 1),
            "The groups are dealt out to the ranks one by one: a rank holds a block of consecutive rows.",
        ),
        Mistake(
            _key_for_each_query,
            "A group has one key and one value, whatever the number of its queries; yours have one for each query.",
        ),
        Mistake(
            lambda wq, wk, wv, d, **rest: qkv_part(_rows_of_a_group_dealt(wq, wk, d), wk, wv, d, **rest),
            "The d rows of a head lie together; yours are taken one by one from the heads of the group.",
        ),
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: (
                torch.cat([w.unflatten(0, (len(wk) // d, -1)) for w in (wk, wv, wq)], 1)
                .flatten(0, 1)
                .chunk(tp_size)[tp_rank]
            ),
            "The order in a group is queries, key, value; yours has the queries last.",
        ),
        Mistake(
            lambda wq, wk, wv, **rest: qkv_part(wq, wv, wk, **rest),
            "Keys and values have changed places: a group is queries, key, value.",
        ),
        Mistake(
            _dealt,
            "A group has n consecutive query heads, the first group heads 0 to n-1; yours are dealt out to the groups.",
        ),
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: torch.cat([w.tensor_split(tp_size)[tp_rank] for w in (wq, wk, wv)]),
            "The right heads in another order: the packed matrix stores queries, key, value of group 0, then those of "
            "group 1.",
        ),
    ],
    idea="One group is its queries, its key and its value: put the rows of a group next to each other, then cut.",
    hint="groups = rows of wk / d. View wq as [groups, ...], wk and wv as [groups, d, h], concatenate along dim 1, "
    "flatten, and take block tp_rank of tp_size equal blocks.",
)

# ---------------------------------------------------------------------------------------------------- attention


def _drive_attention(
    exercise: Any, x: Any, qkv: Any, proj: Any, d: int, queries_per_group: int, dy: Any, tp: Any
) -> dict[str, Any]:
    leaves = {"dx": x, "dqkv": qkv[0], "dqkv_bias": qkv[1], "dproj": proj[0], "dproj_bias": proj[1]}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = exercise.attention(x, tuple(qkv), tuple(proj), d, queries_per_group, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
        y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _heads(
    x: torch.Tensor,
    qkv: Any,
    d: int,
    per_group: int,
    *,
    sees: Callable[[torch.Tensor], torch.Tensor] = torch.tril,
    tile: bool = False,
    divisor: Callable[[int, int], float] = lambda d, h: math.sqrt(d),
    stacked: bool = False,
    swapped: bool = False,
    over: int = -1,
    back: str = "sbhd",
) -> torch.Tensor:
    """Attention by the formula over the heads of one packed part, [s, b, h] -> [s, b, heads * d].

    The softmax runs over dim `over` of [.., query, key]; `back` are the dims of the heads' result that are flattened.
    """
    packed = F.linear(x, *qkv).unflatten(-1, (-1, per_group + 2, d))
    q, k, v = packed[..., :per_group, :], packed[..., per_group, :], packed[..., per_group + 1, :]
    q = q.flatten(2, 3)
    groups = k.shape[2]
    if stacked:
        q, k, v = packed.flatten(2, 3).split([groups * per_group, groups, groups], 2)
    if swapped:
        k, v = v, k
    which = torch.arange(groups * per_group)
    which = which % groups if tile else which // per_group
    k, v = k[:, :, which], v[:, :, which]
    s, b, h = x.shape
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / divisor(d, h)
    scores = scores.masked_fill(~sees(torch.ones(s, s)).bool(), -torch.inf)
    return torch.einsum(f"bhst,tbhd->{back}", scores.softmax(over), v).reshape(s, b, -1)


def _within_a_token(x: torch.Tensor, qkv: Any, d: int, per_group: int) -> torch.Tensor:
    """A mistaken answer: the heads of one token attend to each other, because dim -2 is the head, where SDPA wants the
    token."""
    packed = F.linear(x, *qkv).unflatten(-1, (-1, per_group + 2, d))
    q, k, v = packed.split([per_group, 1, 1], 3)
    q, k, v = q.flatten(2, 3), *(z.expand(-1, -1, -1, per_group, -1).flatten(2, 3) for z in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(2)


def _one_long_sequence(x: torch.Tensor, *part: Any) -> torch.Tensor:
    """A mistaken answer: the dims of tokens and of sequences are flattened to one."""
    s, b, h = x.shape
    return _heads(x.reshape(s * b, 1, h), *part).reshape(s, b, -1)


def _over_sequences(x: torch.Tensor, *part: Any, reshaped: bool, **how: Any) -> torch.Tensor:
    """A mistaken answer: a token attends to other sequences, because [s, b] is taken for [b, s], or reshaped to it."""
    s, b, _ = x.shape
    x = x.reshape(b, s, -1).transpose(0, 1) if reshaped else x.transpose(0, 1)
    out = _heads(x, *part, **how).transpose(0, 1)
    return out.reshape(s, b, -1) if reshaped else out


def _attention(
    ranks: Inputs, f: bool = True, g: bool = True, g_bias: int = 1, residual: int = 0, heads: Any = _heads, **how: Any
) -> list[dict[str, Any]]:
    first = ranks[0]
    xs = [r["x"].clone().requires_grad_() for r in ranks]
    leaves = [[t.clone().requires_grad_() for t in (*r["qkv"], *r["proj"])] for r in ranks]
    parts = [
        F.linear(heads(x, (w, c), first["d"], first["queries_per_group"], **how), p)
        for x, (w, c, p, _) in zip(xs, leaves, strict=True)
    ]
    y = torch.stack(parts).sum(0)
    y.backward(first["dy"])
    dx = sum(x.grad for x in xs) + residual * first["dy"]  # type: ignore[misc]
    more = g_bias * first["proj"][1] + residual * first["x"]
    db = first["dy"].sum((0, 1)) if g_bias else None
    return [
        {"y": (y if g else part).detach() + more, "dx": dx if f else x.grad, "dqkv": w.grad, "dqkv_bias": c.grad,
         "dproj": p.grad, "dproj_bias": db}
        for x, part, (w, c, p, _) in zip(xs, parts, leaves, strict=True)
    ]  # fmt: skip


def _without_the_bias(ranks: Inputs, g_bias: int) -> list[dict[str, Any]]:
    """A mistaken answer: QKV without its bias, and the projection with its bias or without."""
    bare = [{**r, "qkv": [r["qkv"][0], torch.zeros_like(r["qkv"][1])]} for r in ranks]
    return [{**one, "dqkv_bias": None} for one in _attention(bare, g_bias=g_bias)]


def _heads_of(t: int = 0, per_group: int = 0) -> Callable[[Draw], Inputs]:
    """Draw inputs on `t` ranks, by default 2 or 3. All sizes differ, so none can stand for another."""

    def inputs(draw: Draw) -> Inputs:
        (s, b), d, h = draw.shape(2, 2, 6), 2 * draw.integer(1, 3), draw.choice([5, 7, 9])
        g, n = draw.integer(2, 3), per_group or draw.integer(2, 3)
        x, dy, bias = draw.tensor(s, b, h), draw.tensor(s, b, h), draw.tensor(h)
        out = []
        for _ in range(t or draw.integer(2, 3)):
            qkv = [0.5 * draw.tensor(g * (n + 2) * d, h), draw.tensor(g * (n + 2) * d)]
            proj = [draw.tensor(h, g * n * d), bias.clone()]
            rest = {"d": d, "queries_per_group": n, "dy": dy.clone()}
            out.append({"x": x.clone(), "qkv": qkv, "proj": proj, **rest})
        return out

    return inputs


def _means() -> Inputs:
    """Two sequences of two tokens; each rank's head takes one feature as its value and writes it back."""
    out = []
    for r in range(2):
        value = torch.eye(2)[r]
        qkv = [torch.stack([torch.zeros(2), torch.zeros(2), value]), torch.zeros(3)]
        rest = {"proj": [value[:, None].clone(), torch.zeros(2)], "d": 1, "queries_per_group": 1}
        x = torch.tensor([[[2.0, 10.0], [6.0, 50.0]], [[4.0, 30.0], [10.0, 70.0]]])
        out.append({"x": x, "qkv": qkv, **rest, "dy": torch.ones(2, 2, 2)})
    return out


ATTENTION = Exercise(
    "attention",
    reference=_attention,
    drive=_drive_attention,
    axis="tp",
    cases=[
        Case("2 ranks, a head of width 1 each, queries 0: the mean of what a token sees; then 3 ranks", _means(),
             fixed=[_heads_of(3, per_group=1)]),
        Case("grouped queries", _heads_of(2), points=2, hidden=True, fixed=[
            _heads_of(2, per_group=2), _heads_of(2, per_group=3)]),
        Case(
            "right numbers, and one sum forward and one backward", _heads_of(), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 2), at_most("y and dx", lambda i: 2 * i[0]["x"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _attention(ranks, sees=lambda ones: ones),
            "Each token sees the tokens behind it, too. It may see only itself and what came before it.",
        ),
        Mistake(
            lambda ranks: _attention(ranks, sees=torch.triu),
            "Your mask is upside down: each token sees itself and what comes behind it.",
        ),
        Mistake(
            lambda ranks: _attention(ranks, over=-2),
            "Your softmax runs over the queries: the weights that one query gives to the keys must add up to 1.",
        ),
        *(
            Mistake(
                lambda ranks, reshaped=reshaped: _attention(ranks, heads=_over_sequences, reshaped=reshaped),
                "Tokens of different sequences see each other: dim 0 of x is the token, dim 1 the sequence.",
            )
            for reshaped in (False, True)
        ),
        Mistake(
            lambda ranks: _attention(ranks, heads=_one_long_sequence),
            "Tokens of different sequences see each other: dim 0 of x is the token, dim 1 the sequence.",
        ),
        Mistake(
            lambda ranks: _attention(ranks, stacked=True),
            "You cut the packed features as a stack [Q; K; V]. They are packed group by group: the queries of a group, "
            "its key, its value.",
        ),
        Mistake(lambda ranks: _attention(ranks, divisor=lambda d, h: 1.0), "Your scores are not divided by sqrt(d)."),
        *(
            Mistake(
                lambda ranks, divisor=divisor: _attention(ranks, divisor=divisor),
                "Your scores are divided by another number than sqrt(d), where d is the width of one head.",
            )
            for divisor in (lambda d, h: d, lambda d, h: math.sqrt(h))
        ),
        Mistake(lambda ranks: _attention(ranks, swapped=True), "Keys and values have changed places: a group is its "
                "queries, its key, its value."),
        Mistake(
            lambda ranks: _attention(ranks, heads=_within_a_token),
            "The heads of a token attend to each other: dim -2 of what SDPA gets is the token.",
        ),
        Mistake(
            lambda ranks: _attention(ranks, back="bhsd"),
            "The heads' results are right, and reshaped from [b, heads, s, d] as they lie; the dims must first be put "
            "back in the order s, b, heads, d.",
        ),
        Mistake(
            lambda ranks: _attention(ranks, tile=True),
            "Query heads 0 .. n-1 use group 0, the next n group 1: repeat_interleave, not repeat.",
        ),
        Mistake(lambda ranks: _attention(ranks, f=False), "dx is only the share of this rank's heads."),
        Mistake(lambda ranks: _attention(ranks, g=False), "y is only the share of this rank's heads."),
        Mistake(lambda ranks: _attention(ranks, g_bias=len(ranks)), "Every rank added the output bias before the sum."),
        Mistake(
            lambda ranks: [
                {**dict.fromkeys(one, ANYTHING), "y": one["y"]} for one in _attention(ranks, g=False)
            ],
            "y is only the share of this rank's heads.",
        ),
        Mistake(
            lambda ranks: [{**one, "dx": len(ranks) * one["dx"]} for one in _attention(ranks)],
            "dx is summed once too often: `column_linear` sums it already.",
        ),
        Mistake(lambda ranks: _attention(ranks, g_bias=0), "The bias of the projection is not added."),
        *(
            Mistake(lambda ranks, g_bias=g_bias: _without_the_bias(ranks, g_bias), "The bias of QKV is not added.")
            for g_bias in (0, 1)
        ),
        Mistake(lambda ranks: _attention(ranks, residual=1), "You added x itself. The residual stands outside of "
                "attention, in the layer."),
    ],
    idea="Write the shape beside each line: which dim is the token, which the batch, which the head?",
    hint="column_linear, unflatten(-1, (-1, n + 2, d)), split into n queries, one key, one value; SDPA wants "
    "[b, heads, s, d]; back to [s, b, heads * d]; row_linear. Nothing travels in between.",
    rtol=1e-3,
    atol=1e-4,
)  # fmt: skip
