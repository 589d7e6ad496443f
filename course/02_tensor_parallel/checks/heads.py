"""Lab 02, heads over tp: which rows of the packed QKV matrix a rank holds, and attention between f and g.

The packed matrix stores, for each key/value group, its queries, its key and its value; so equal blocks of rows are
whole groups. `_heads` is attention by the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import sends
from labkit.exercises import Case, Draw, Exercise

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- the packed QKV


def qkv_part(wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """This rank's rows of the packed matrix: per key/value group its queries, its key, its value."""
    by_group = [w.unflatten(0, (wk.shape[0] // d, -1)) for w in (wq, wk, wv)]
    return torch.cat(by_group, 1).flatten(0, 1).chunk(tp_size)[tp_rank]


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
        Case("other heads and ranks", _grouped, points=2, hidden=True, fixed=[
            partial(_grouped, t=3, g=3, n=1), partial(_grouped, t=4, g=2, n=4), partial(_grouped, t=2, g=6, n=3)]),
    ],
    idea="One group is its queries, its key and its value: put the rows of a group next to each other, then cut.",
    hint="groups = rows of wk / d. View wq as [groups, ...], wk and wv as [groups, d, h], concatenate along dim 1, "
    "flatten, and take block tp_rank of tp_size equal blocks.",
)  # fmt: skip

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


def _heads(x: torch.Tensor, qkv: Any, d: int, per_group: int) -> torch.Tensor:
    """Attention by the formula over the heads of one packed part, [s, b, h] -> [s, b, heads * d]."""
    s, b, _ = x.shape
    packed = F.linear(x, *qkv).unflatten(-1, (-1, per_group + 2, d))
    q, k, v = packed[..., :per_group, :], packed[..., per_group, :], packed[..., per_group + 1, :]
    scores = torch.einsum("sbgnd,tbgd->bgnst", q, k) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
    return torch.einsum("bgnst,tbgd->sbgnd", scores.softmax(-1), v).reshape(s, b, -1)


def _attention(ranks: Inputs) -> list[dict[str, Any]]:
    first = ranks[0]
    xs = [r["x"].clone().requires_grad_() for r in ranks]
    leaves = [[t.clone().requires_grad_() for t in (*r["qkv"], r["proj"][0])] for r in ranks]
    parts = [
        F.linear(_heads(x, (w, c), first["d"], first["queries_per_group"]), p)
        for x, (w, c, p) in zip(xs, leaves, strict=True)
    ]
    y = torch.stack(parts).sum(0)
    y.backward(first["dy"])
    dx = torch.stack([x.grad for x in xs]).sum(0)
    both = {"y": y.detach() + first["proj"][1], "dx": dx, "dproj_bias": first["dy"].sum((0, 1))}
    return [{**both, "dqkv": w.grad, "dqkv_bias": c.grad, "dproj": p.grad} for w, c, p in leaves]


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
            "right numbers, and one sum forward and one backward", _heads_of(per_group=2), hidden=True,
            accept=[sends("all_reduce", times=2, at_most=("y and dx", lambda i: 2 * i[0]["x"].nbytes))],
        ),
    ],
    idea="Write the shape beside each line: which dim is the token, which the batch, which the head?",
    hint="column_linear, unflatten(-1, (-1, n + 2, d)), split into n queries, one key, one value; SDPA wants "
    "[b, heads, s, d]; back to [s, b, heads * d]; row_linear. Nothing travels in between.",
    rtol=1e-3,
    atol=1e-4,
)  # fmt: skip
