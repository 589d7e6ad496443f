"""Checks of lab 02: bytes and activations in closed form, split matrices, heads, vocabulary and sequence, overlap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.lab.checks import at_most, count, only
from minimegatron.lab.exercises import Answer, Case, Draw, Exercise, Lab, Mistake

Inputs = list[dict[str, Any]]

# --------------------------------------------------------------------------------------------- 1 bytes of a layer


def bytes_per_layer(s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool) -> float:
    """What each rank sends over tp for one layer, forward and backward, when collectives run as rings."""
    return (10 if sequence_parallel else 8) * s * b * h * element_size * (t - 1) / t


def _a_layer(sequence_parallel: bool) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        shape = {"s": 128 * draw.integer(1, 64), "b": draw.integer(1, 8), "h": 64 * draw.integer(8, 256)}
        return {
            **shape, "t": draw.choice([2, 4, 8]), "element_size": draw.choice([2, 4]),
            "sequence_parallel": sequence_parallel,
        }  # fmt: skip

    return sizes


def _factor(plain: float, sequence: float) -> Callable[..., float]:
    def nbytes(s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool) -> float:
        return (sequence if sequence_parallel else plain) * s * b * h * element_size * (t - 1) / t

    return nbytes


_GPT3 = {"s": 2048, "b": 1, "h": 12288}

_BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        Case("GPT-3 on 8 ranks, bf16", {**_GPT3, "t": 8, "element_size": 2, "sequence_parallel": False}),
        Case("the same with sequence parallelism", {**_GPT3, "t": 8, "element_size": 2, "sequence_parallel": True}),
        Case("one rank sends nothing", {**_GPT3, "t": 1, "element_size": 2, "sequence_parallel": True}),
        Case("other layers", _a_layer(False), hidden=True),
        Case("other layers, sequence parallelism", _a_layer(True), hidden=True),
    ],
    mistakes=[
        Mistake(_factor(8, 8), "One gather is missing: x is stored cut, and the backward pass needs it whole for dW."),
        Mistake(
            _factor(4, 4),
            "Half of it. Forward and backward each send two sums, and a ring all-reduce sends its tensor almost twice: "
            "2 n (t-1)/t.",
        ),
        Mistake(_factor(8, 5), "Forward and backward: what is said of one way holds for the other."),
        Mistake(
            lambda s, b, h, t, element_size, sequence_parallel: (10 if sequence_parallel else 8)
            * s * b * h * element_size,
            "A ring sends t-1 of t parts: one rank alone sends nothing.",
        ),
    ],
    hint="Two column-row pairs, each with one sum forward and one backward, of s*b*h elements. An all-reduce costs "
    "2 n (t-1)/t; with sequence parallelism each becomes an all-gather and a reduce-scatter, and each pair gathers its "
    "input once more.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------- 2 activations


def activation_bytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> float:
    """Korthikanti et al. 2022, table 2: 16-bit activations of one layer with dropout and stored attention scores."""
    if sequence_parallel:
        return s * b * h / t * (34 + 5 * a * s / h)
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def _activations(everything: float, divided: float, scores: float = 5.0, scores_cut: bool = True) -> Any:
    def nbytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> float:
        whole = 0.0 if sequence_parallel else everything
        cut = everything + divided if sequence_parallel else divided
        return s * b * h * (whole + cut / t) + scores * a * s * s * b / (t if scores_cut else 1)

    return nbytes


def _a_model(sequence_parallel: bool) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        a = 8 * draw.integer(1, 16)
        return {
            "s": 256 * draw.integer(1, 16), "b": draw.integer(1, 4), "h": 128 * a, "a": a,
            "t": draw.choice([2, 4, 8]), "sequence_parallel": sequence_parallel,
        }  # fmt: skip

    return sizes


_ACTIVATIONS = Exercise(
    "activation_bytes",
    reference=activation_bytes,
    cases=[
        Case("GPT-3, one rank", {**_GPT3, "a": 96, "t": 1, "sequence_parallel": False}),
        Case("GPT-3 on 8 ranks", {**_GPT3, "a": 96, "t": 8, "sequence_parallel": False}),
        Case("GPT-3 on 8 ranks, sequence parallelism", {**_GPT3, "a": 96, "t": 8, "sequence_parallel": True}),
        Case("other models", _a_model(False), hidden=True),
        Case("other models, sequence parallelism", _a_model(True), hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, b, h, a, t, True),
            "Without sequence parallelism norms, dropouts and the inputs of column layers are whole on every rank: "
            "10 of the 34 bytes.",
        ),
        Mistake(
            lambda s, b, h, a, t, sequence_parallel: activation_bytes(s, b, h, a, t, False),
            "With sequence parallelism the 10 bytes of norms, dropouts and inputs are cut over the sequence as well.",
        ),
        Mistake(_activations(10, 24, 5, scores_cut=False), "Attention scores belong to heads, and heads are divided."),
        Mistake(_activations(10, 24, 0), "The scores are missing: softmax, its dropout and the mask, 5 a s^2 b."),
        Mistake(_activations(8, 24), "Dropout masks are bytes too: one at the end of attention, one of the MLP."),
        Mistake(_activations(6, 28), "The input of a column layer is whole on every rank: it is what f copies."),
    ],
    hint="Add up the column 'bytes' of the table, once for the rows that tp divides and once for the others.",
)

# ---------------------------------------------------------------------------------------- 3, 4 column and row


def _drive_linear(exercise: Any, x: Any, weight: Any, bias: Any, dy: Any, kind: str) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    tp = Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    leaves = {"dx": x, "dw": weight, **({} if bias is None else {"db": bias})}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = getattr(exercise, kind)(x, weight, bias, tp)
    y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _local_linear(r: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One rank's part of a linear layer, without any communication."""
    flat_dy, flat_x = r["dy"].flatten(0, 1), r["x"].flatten(0, 1)
    out = {"y": F.linear(r["x"], r["weight"], r["bias"]), "dx": r["dy"] @ r["weight"], "dw": flat_dy.t() @ flat_x}
    return out if r["bias"] is None else {**out, "db": flat_dy.sum(0)}


def _column(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear(r) for r in ranks]
    total = torch.stack([p["dx"] for p in parts]).sum(0)
    return [{**p, "dx": total} for p in parts]


def _row(ranks: Inputs, bias_times: float = 1, gradient_times: float = 1) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear({**r, "bias": None}) for r in ranks]
    total, bias = torch.stack([p["y"] for p in parts]).sum(0), ranks[0]["bias"]
    y = total if bias is None else total + bias_times * bias
    out = []
    for r, p in zip(ranks, parts, strict=True):
        one = {"y": y, "dx": gradient_times * p["dx"], "dw": gradient_times * p["dw"]}
        out.append(one if bias is None else {**one, "db": r["dy"].sum((0, 1))})
    return out


def _linear_inputs(kind: str, bias: bool = True) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        t, s, b = draw.integer(2, 4), draw.integer(2, 5), draw.integer(1, 3)
        i, o = draw.integer(2, 6), draw.integer(2, 6)
        x, dy, shared = draw.tensor(s, b, i), draw.tensor(s, b, o), draw.tensor(o) if bias else None
        out = []
        for _ in range(t):
            mine = {"weight": draw.tensor(o, i), "kind": kind}
            if kind == "column_linear":
                own = draw.tensor(o) if bias else None
                out.append({**mine, "x": x.clone(), "bias": own, "dy": draw.tensor(s, b, o)})
            else:
                own = shared.clone() if shared is not None else None
                out.append({**mine, "x": draw.tensor(s, b, i), "bias": own, "dy": dy.clone()})
        return out

    return inputs


def _nbytes_of(name: str) -> Callable[[Inputs], float]:
    return lambda inputs: inputs[0][name].nbytes


_COLUMN = Exercise(
    "column_linear",
    reference=_column,
    drive=_drive_linear,
    cases=[
        Case("y and all gradients", _linear_inputs("column_linear"), points=2, hidden=True),
        Case("without a bias", _linear_inputs("column_linear", bias=False), hidden=True),
        Case(
            "one message: dx", _linear_inputs("column_linear"), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", _nbytes_of("x"))],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [_local_linear(r) for r in ranks],
            "dx is only this rank's share: x went into other work on every rank, so the shares must be summed (f).",
        ),
    ],
    hint="F.linear with this rank's rows, behind f: nothing travels forward, dx is summed backward. Do not gather y: "
    "the row layer wants it cut.",
)  # fmt: skip

_ROW = Exercise(
    "row_linear",
    reference=_row,
    drive=_drive_linear,
    cases=[
        Case("y and all gradients", _linear_inputs("row_linear"), points=2, hidden=True),
        Case("without a bias", _linear_inputs("row_linear", bias=False), hidden=True),
        Case(
            "one message: y", _linear_inputs("row_linear"), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("y", _nbytes_of("dy"))],
        ),
    ],
    mistakes=[
        Mistake(lambda ranks: _row(ranks, bias_times=len(ranks)), "Each rank added the bias before the sum: t biases."),
        Mistake(lambda ranks: [_local_linear(r) for r in ranks], "This is a partial sum of y: nobody has added them."),
        Mistake(
            lambda ranks: _row(ranks, gradient_times=len(ranks)),
            "Summed once too often: dy is already the same on every rank (g does nothing backward).",
        ),
    ],
    hint="A partial product with this rank's columns, then g (an all-reduce whose backward does nothing), then the "
    "bias, once.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------- 5 the packed QKV


def qkv_part(wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """This rank's rows of the packed matrix: per key/value group its queries, its key, its value."""
    groups = wk.shape[0] // d
    packed = torch.cat([w.unflatten(0, (groups, -1)) for w in (wq, wk, wv)], 1)
    return packed.flatten(0, 1).chunk(tp_size)[tp_rank]


def _three(a: int, g: int, d: int, h: int, tensor: Callable[..., torch.Tensor]) -> dict[str, Any]:
    return {"wq": tensor(a * d, h), "wk": tensor(g * d, h), "wv": tensor(g * d, h), "d": d}


def _rows(a: int, g: int, t: int, rank: int) -> dict[str, Any]:
    """Heads of one row each, whose rows say which they are: query 3 is 3, key 1 is 101, value 1 is 201."""
    starts = {"wq": (0, a), "wk": (100, g), "wv": (200, g)}
    weights = {n: torch.arange(float(start), start + size)[:, None] for n, (start, size) in starts.items()}
    return {**weights, "d": 1, "tp_rank": rank, "tp_size": t}


def _grouped(draw: Draw) -> dict[str, Any]:
    t = draw.choice([2, 4])
    g = t * draw.integer(1, 2)
    a = g * draw.integer(2, 3)
    sizes = _three(a, g, draw.integer(2, 4), draw.integer(2, 4), draw.tensor)
    return {**sizes, "tp_rank": draw.integer(0, t - 1), "tp_size": t}


_QKV = Exercise(
    "qkv_part",
    reference=qkv_part,
    cases=[
        Case("4 query heads, 2 groups, rank 1 of 2", _rows(4, 2, 2, 1)),
        Case("8 query heads, 4 groups, rank 0 of 2", _rows(8, 4, 2, 0)),
        Case("fewer groups than ranks: rank 1 of 4 with one group", _rows(6, 1, 4, 1)),
        Case("other heads and ranks", _grouped, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: torch.cat([wq, wk, wv]).tensor_split(tp_size)[tp_rank],
            "An equal cut of the stack [Q; K; V] gives rank 0 nothing but queries. Pack the rows by group first.",
        ),
        Mistake(
            lambda wq, wk, wv, d, tp_rank, tp_size: torch.cat([w.tensor_split(tp_size)[tp_rank] for w in (wq, wk, wv)]),
            "The right heads in another order: the packed matrix stores queries, key, value of group 0, then those of "
            "group 1.",
        ),
    ],
    hint="groups = rows of wk / d. View wq as [groups, ...], wk and wv as [groups, d, h], concatenate along dim 1, "
    "flatten, and take block tp_rank of tp_size equal blocks.",
)

# ------------------------------------------------------------------------------------------------- 6 attention


def _drive_attention(
    exercise: Any, x: Any, qkv: Any, proj: Any, d: int, queries_per_group: int, dy: Any
) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    tp = Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    leaves = {"dx": x, "dqkv": qkv[0], "dqkv_bias": qkv[1], "dproj": proj[0], "dproj_bias": proj[1]}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = exercise.attention(x, tuple(qkv), tuple(proj), d, queries_per_group, tp)
    y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _heads(
    x: torch.Tensor, qkv: Any, d: int, per_group: int, *, causal: bool = True, tile: bool = False, scale: bool = True
) -> torch.Tensor:
    """Attention of the heads in one packed part, [s, b, h] -> [s, b, heads * d]; by the formula."""
    packed = F.linear(x, *qkv).unflatten(-1, (-1, per_group + 2, d))
    q, k, v = packed[..., :per_group, :], packed[..., per_group, :], packed[..., per_group + 1, :]
    q = q.flatten(2, 3)
    groups = k.shape[2]
    which = torch.arange(groups * per_group)
    which = which % groups if tile else which // per_group
    k, v = k[:, :, which], v[:, :, which]
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / (math.sqrt(d) if scale else 1)
    if causal:
        s = x.shape[0]
        scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


def _attention(ranks: Inputs, f: bool = True, g_bias: int = 1, **how: bool) -> list[dict[str, torch.Tensor]]:
    first = ranks[0]
    xs = [r["x"].clone().requires_grad_() for r in ranks]
    leaves = [[t.clone().requires_grad_() for t in (*r["qkv"], *r["proj"])] for r in ranks]
    y: Any = 0
    for x, (w, c, p, _) in zip(xs, leaves, strict=True):
        y = y + F.linear(_heads(x, (w, c), first["d"], first["queries_per_group"], **how), p)
    (y + 0).backward(first["dy"])
    dx = sum(x.grad for x in xs)  # type: ignore[misc]
    out = y.detach() + g_bias * first["proj"][1]
    db = first["dy"].sum((0, 1))
    return [
        {"y": out, "dx": dx if f else x.grad, "dqkv": w.grad, "dqkv_bias": c.grad, "dproj": p.grad, "dproj_bias": db}
        for x, (w, c, p, _) in zip(xs, leaves, strict=True)
    ]


def _attention_inputs(draw: Draw, groups: tuple[int, int] = (1, 2), per_group: tuple[int, int] = (2, 3)) -> Inputs:
    t, s, b, d = draw.integer(2, 3), draw.integer(3, 6), draw.integer(1, 2), 2 * draw.integer(1, 3)
    g, n, h = draw.integer(*groups), draw.integer(*per_group), draw.integer(4, 8)
    x, dy, bias = draw.tensor(s, b, h), draw.tensor(s, b, h), draw.tensor(h)
    out = []
    for _ in range(t):
        qkv = [draw.tensor(g * (n + 2) * d, h), draw.tensor(g * (n + 2) * d)]
        proj = [draw.tensor(h, g * n * d), bias.clone()]
        rest = {"d": d, "queries_per_group": n, "dy": dy.clone()}
        out.append({"x": x.clone(), "qkv": qkv, "proj": proj, **rest})
    return out


def _two_groups(draw: Draw) -> Inputs:
    return _attention_inputs(draw, (2, 3))


def _one_query(draw: Draw) -> Inputs:
    return _attention_inputs(draw, (2, 3), (1, 1))


_ATTENTION = Exercise(
    "attention",
    reference=_attention,
    drive=_drive_attention,
    cases=[
        Case("one query head for each key/value head", _one_query, hidden=True),
        Case("grouped queries", _two_groups, points=2, hidden=True),
        Case(
            "one sum forward, one backward", _two_groups, hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 2), at_most("y and dx", lambda i: 2 * i[0]["x"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(lambda ranks: _attention(ranks, causal=False), "A token sees only itself and what came before it."),
        Mistake(lambda ranks: _attention(ranks, scale=False), "The scores are divided by sqrt(d)."),
        Mistake(
            lambda ranks: _attention(ranks, tile=True),
            "Query heads 0 .. n-1 use group 0, the next n group 1: repeat_interleave, not repeat.",
        ),
        Mistake(lambda ranks: _attention(ranks, f=False), "dx is only the share of this rank's heads: begin with f."),
        Mistake(lambda ranks: _attention(ranks, g_bias=len(ranks)), "Every rank added the output bias before the sum."),
    ],
    hint="column_linear, unflatten(-1, (-1, n + 2, d)), split into n queries, one key, one value; SDPA wants "
    "[b, heads, s, d]; back to [s, b, heads * d]; row_linear. Nothing travels in between.",
    rtol=1e-3,
    atol=1e-4,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------- 7 embedding


def _drive_embedding(exercise: Any, ids: Any, weight: Any, dy: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    tp = Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    weight.requires_grad_()
    y = exercise.embedding(ids, weight, tp)
    y.backward(dy)
    return {"y": y.detach(), "dw": weight.grad}


def _embedding(ranks: Inputs, masked: bool = True, summed: bool = True) -> list[dict[str, torch.Tensor]]:
    parts, n = [], ranks[0]["weight"].shape[0]
    for rank, r in enumerate(ranks):
        weight = r["weight"].clone().requires_grad_()
        local = r["ids"] - rank * n
        own = (local >= 0) & (local < n)
        rows = F.embedding(local.clamp(0, n - 1), weight)
        rows = rows * own.unsqueeze(-1) if masked else rows
        rows.backward(r["dy"])
        parts.append({"y": rows.detach(), "dw": weight.grad})
    total = torch.stack([p["y"] for p in parts]).sum(0)
    return [{"y": total if summed else p["y"], "dw": p["dw"]} for p in parts]


def _ids(draw: Draw) -> Inputs:
    t, n, s, b, h = draw.integer(2, 4), draw.integer(8, 20), draw.integer(3, 6), draw.integer(1, 3), draw.integer(2, 4)
    ids = torch.tensor([[draw.integer(0, t * n - 1) for _ in range(b)] for _ in range(s)])
    dy = draw.tensor(s, b, h)
    return [{"ids": ids.clone(), "weight": draw.tensor(n, h), "dy": dy.clone()} for _ in range(t)]


def _borders(draw: Draw) -> Inputs:
    out = _ids(draw)
    t, n = len(out), out[0]["weight"].shape[0]
    ids = torch.tensor([[r * n] for r in range(t)] + [[r * n + n - 1] for r in range(t)])
    dy = draw.tensor(2 * t, 1, out[0]["weight"].shape[1])
    return [{"ids": ids.clone(), "weight": r["weight"], "dy": dy.clone()} for r in out]


_EMBEDDING = Exercise(
    "embedding",
    reference=_embedding,
    drive=_drive_embedding,
    cases=[
        Case("the first and the last id of every rank", _borders, hidden=True),
        Case("rows and their gradients", _ids, points=2, hidden=True),
        Case(
            "one sum of [s, b, h], nothing backward", _ids, hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("s*b*h elements", _nbytes_of("dy"))],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _embedding(ranks, masked=False),
            "Ids of other ranks must give zeros here; yours give some row of this rank's, which enters the sum.",
        ),
        Mistake(lambda ranks: _embedding(ranks, summed=False), "These are this rank's rows only: sum over ranks (g)."),
    ],
    hint="Rank r owns ids [r n, (r+1) n). Look up id - r n where it is owned, zeros elsewhere, then g. The table "
    "itself never travels.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------- 8 cross entropy


def _drive_loss(exercise: Any, logits: Any, target: Any, dloss: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    tp = Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    logits.requires_grad_()
    loss = exercise.cross_entropy(logits, target, tp)
    loss.backward(dloss)
    return {"loss": loss.detach(), "dz": logits.grad}


def _cross_entropy(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    z = torch.cat([r["logits"].double() for r in ranks], -1).requires_grad_()
    loss = F.cross_entropy(z.flatten(0, 1), ranks[0]["target"].flatten(), reduction="none").view_as(ranks[0]["target"])
    loss.backward(ranks[0]["dloss"].double())
    assert z.grad is not None, "the reference has a gradient"
    return [{"loss": loss.detach().float(), "dz": dz.float()} for dz in z.grad.chunk(len(ranks), -1)]


def _by_parts(local_softmax: bool, global_max: bool = True) -> Callable[[Inputs], list[dict[str, torch.Tensor]]]:
    """The loss whose softmax is normalised, or whose maximum is taken, over the local vocabulary only."""

    def answer(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
        n, target, dloss = ranks[0]["logits"].shape[-1], ranks[0]["target"], ranks[0]["dloss"]
        zs = [r["logits"] - r["logits"].amax(-1, keepdim=True) * (0 if global_max else 1) for r in ranks]
        sums = [z.exp().sum(-1) for z in zs]
        total = torch.stack(sums).sum(0)
        own = [(target >= r * n) & (target < (r + 1) * n) for r in range(len(zs))]
        at = [(target - r * n).clamp(0, n - 1).unsqueeze(-1) for r in range(len(zs))]
        picked = sum(z.gather(-1, i).squeeze(-1) * o for z, i, o in zip(zs, at, own, strict=True))
        out = []
        for z, s, i, o in zip(zs, sums, at, own, strict=True):
            partition = s if local_softmax else total
            dz = z.exp() / partition.unsqueeze(-1)
            dz = dz.scatter_add(-1, i, -o.unsqueeze(-1).float()) * dloss.unsqueeze(-1)
            out.append({"loss": partition.log() - picked, "dz": dz})
        return out

    return answer


def _upstream_lost(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _cross_entropy(ranks)
    dloss = ranks[0]["dloss"].unsqueeze(-1)
    return [{"loss": a["loss"], "dz": a["dz"] / dloss} for a in right]


def _not_the_target(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    z = torch.cat([r["logits"] for r in ranks], -1)
    dz = z.softmax(-1) * ranks[0]["dloss"].unsqueeze(-1)
    parts = dz.chunk(len(ranks), -1)
    return [{"loss": a["loss"], "dz": p} for a, p in zip(_cross_entropy(ranks), parts, strict=True)]


def _logits(scale: float = 1.0) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        t, n, s, b = draw.integer(2, 4), draw.integer(40, 60), draw.integer(2, 5), draw.integer(1, 3)
        target = torch.tensor([[draw.integer(0, t * n - 1) for _ in range(b)] for _ in range(s)])
        target[0, 0], target[1, 0] = n - 1, n
        dloss = draw.tensor(s, b)
        parts = [scale * draw.tensor(s, b, n) for _ in range(t)]
        return [{"logits": z, "target": target.clone(), "dloss": dloss.clone()} for z in parts]

    return inputs


def _few_numbers(inputs: Inputs) -> float:
    """Three fp32 numbers a token, or their gathered parts and two more; the logits would be forty a rank."""
    return 4 * (len(inputs) + 2) * inputs[0]["target"].numel()


_LOSS = Exercise(
    "cross_entropy",
    reference=_cross_entropy,
    drive=_drive_loss,
    cases=[
        Case("loss and gradient", _logits(), points=2, hidden=True),
        Case("logits in the hundreds", _logits(300.0), hidden=True),
        Case(
            "a few numbers a token travel, never the logits", _logits(), points=2, hidden=True,
            accept=[at_most("the bound, t + 2 numbers a token,", _few_numbers)],
        ),
    ],
    mistakes=[
        Mistake(
            _by_parts(local_softmax=False),
            "exp() of large logits overflows: subtract the maximum over the whole vocabulary first.",
        ),
        Mistake(
            _by_parts(local_softmax=True),
            "Your softmax is normalised over this rank's words: sum exp(z) over ranks as well.",
        ),
        Mistake(
            _by_parts(local_softmax=False, global_max=False),
            "Each rank subtracted its own maximum: the terms of the sum are on different scales. "
            "Take the max over ranks.",
        ),
        Mistake(_upstream_lost, "The gradient that arrives, one number a token, multiplies dz."),
        Mistake(_not_the_target, "dz is softmax minus one at the target, on the rank that owns it."),
    ],
    hint="max over ranks of the local max; subtract; sum over ranks of exp(z).sum; sum over ranks of the target's "
    "logit, zero where it is not owned; log(sum) - target. Three numbers a token travel forward, none backward.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------- 9 sequence pair


def _drive_sequence(exercise: Any, x: Any, w: Any, what: str) -> dict[str, Any]:
    import torch.distributed as dist

    from minimegatron.comm.mesh import Axis

    tp = Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    x.requires_grad_()
    if what == "gather":
        y = exercise.gather_sequence(x, tp)
    elif what == "reduce_scatter":
        y = exercise.reduce_scatter_sequence(x, tp)
    else:
        y = exercise.reduce_scatter_sequence((exercise.gather_sequence(x, tp) * w).tanh(), tp)
    (y if what == "pair" else y * w).sum().backward()
    return {"y": y.detach(), "dx": x.grad}


def _sequence(ranks: Inputs, gather_sums: bool = True, whole: bool = True) -> list[dict[str, torch.Tensor]]:
    what, t = ranks[0]["what"], len(ranks)
    ws = [r["w"] for r in ranks]
    if what == "gather":
        y, total = torch.cat([r["x"] for r in ranks]), torch.stack(ws).sum(0)
        each = [total if gather_sums else w for w in ws]
        return [{"y": y, "dx": d.chunk(t)[r]} for r, d in enumerate(each)]
    if what == "reduce_scatter":
        parts = torch.stack([r["x"] for r in ranks]).sum(0).chunk(t)
        back = torch.cat(ws)
        own = [torch.cat([w if i == r else torch.zeros_like(w) for i in range(t)]) for r, w in enumerate(ws)]
        return [{"y": p, "dx": back if whole else own[r]} for r, p in enumerate(parts)]
    xs = [r["x"].clone().requires_grad_() for r in ranks]
    full = torch.cat(xs)
    y = sum((full * w).tanh() for w in ws)
    y.sum().backward()  # type: ignore[union-attr]
    return [{"y": p.detach(), "dx": x.grad} for p, x in zip(y.chunk(t), xs, strict=True)]  # type: ignore[union-attr]


def _tokens(what: str) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        t, n, h = draw.integer(2, 4), draw.integer(1, 4), draw.integer(1, 4)
        rows = {"gather": (n, t * n), "reduce_scatter": (t * n, n), "pair": (n, t * n)}[what]
        return [{"x": draw.tensor(rows[0], 2, h), "w": draw.tensor(rows[1], 2, h), "what": what} for _ in range(t)]

    return inputs


_SEQUENCE = Exercise(
    "sequence_pair",
    reference=_sequence,
    function="gather_sequence",
    drive=_drive_sequence,
    accept=[only("all_gather", "reduce_scatter")],
    cases=[
        Case("gather_sequence: forward and gradient", _tokens("gather"), points=2, hidden=True),
        Case("reduce_scatter_sequence: forward and gradient", _tokens("reduce_scatter"), points=2, hidden=True),
        Case("the pair around different work on each rank", _tokens("pair"), hidden=True),
    ],
    mistakes=[
        Mistake(
            lambda ranks: _sequence(ranks, gather_sums=False),
            "Every rank used the gathered tokens for other work: their gradients must be summed, then cut "
            "(reduce-scatter).",
        ),
        Mistake(
            lambda ranks: _sequence(ranks, whole=False),
            "Each rank's tokens are a sum over all ranks' inputs: the gradient of every token goes back to every rank "
            "(all-gather).",
        ),
    ],
    hint="The two are each other's mirror image: all-gather forward has reduce-scatter backward, and the other way "
    "round, along dim 0. An all-reduce would send twice as much.",
)

# ------------------------------------------------------------------------------------------ 10 partial gradients

_NAMES = [
    "embedding.word_embeddings.weight", "embedding.position_embeddings.weight",
    "layers.0.input_layernorm.weight", "layers.0.input_layernorm.bias",
    "layers.0.self_attention.linear_qkv.weight", "layers.0.self_attention.linear_qkv.bias",
    "layers.0.self_attention.q_layernorm.weight", "layers.0.self_attention.k_layernorm.weight",
    "layers.0.self_attention.linear_proj.weight", "layers.0.self_attention.linear_proj.bias",
    "layers.0.pre_mlp_layernorm.weight", "layers.0.pre_mlp_layernorm.bias",
    "layers.0.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc1.bias",
    "layers.0.mlp.linear_fc2.weight", "layers.0.mlp.linear_fc2.bias",
    "final_layernorm.weight", "final_layernorm.bias", "output_layer.weight",
]  # fmt: skip


def _of_heads(name: str) -> bool:
    return "q_layernorm" in name or "k_layernorm" in name


def _of_tokens(name: str) -> bool:
    norm = "layernorm" in name and not _of_heads(name)
    return norm or name.endswith(("linear_proj.bias", "linear_fc2.bias")) or "position_embeddings" in name


def partial_gradients(names: list[str], sequence_parallel: bool) -> list[str]:
    return [n for n in names if _of_heads(n) or (sequence_parallel and _of_tokens(n))]


def _choose(rule: Callable[[str, bool], bool]) -> Callable[..., list[str]]:
    return lambda names, sequence_parallel: [n for n in names if rule(n, sequence_parallel)]


def _some_names(draw: Draw) -> dict[str, Any]:
    sp, layer = draw.choice([True, False]), draw.integer(1, 9)
    names = [n.replace("layers.0", f"layers.{layer}") for n in draw.random.sample(_NAMES, draw.integer(10, 16))]
    return {"names": names, "sequence_parallel": sp}


_PARTIAL = Exercise(
    "partial_gradients",
    reference=partial_gradients,
    cases=[
        Case("a GPT with sequence parallelism", {"names": _NAMES, "sequence_parallel": True}, points=2),
        Case("the same without", {"names": _NAMES, "sequence_parallel": False}),
        Case("other names, in any order", _some_names, hidden=True),
    ],
    mistakes=[
        Mistake(
            _choose(lambda n, sp: sp and (_of_tokens(n) or _of_heads(n))),
            "The norms of queries and keys see only this rank's heads: partial also without sequence parallelism.",
        ),
        Mistake(
            _choose(lambda n, sp: (sp and "layernorm" in n) or _of_heads(n)),
            "Norms are not all: what else is replicated and meets only this rank's tokens? Row biases and positions.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] and "position" not in n),
            "The positions are added to this rank's tokens only.",
        ),
        Mistake(
            _choose(lambda n, sp: partial_gradients([n], sp) != [] or (sp and n.endswith("bias"))),
            "A column layer's bias is cut over tp as its rows are: each rank's part is complete.",
        ),
        Mistake(
            _choose(lambda n, sp: _of_tokens(n) or _of_heads(n)),
            "Without sequence parallelism every rank sees all tokens: norms and row biases are complete then.",
        ),
    ],
    hint="Partial is what is replicated over tp and used on only a part of the work: on this rank's tokens (with "
    "sequence parallelism) or on this rank's heads (always). What is cut over tp is complete.",
)

# -------------------------------------------------------------------------------------------------- 11 overlap


def _drive_overlap(exercise: Any, dy: Any, x: Any, weight: Any, watch: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from minimegatron.comm.mesh import Axis

    tp = Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    order = []
    real = dist.all_reduce

    class Handle:
        def __init__(self, work):
            self.work = work

        def wait(self, *args):
            order.append("wait")
            return self.work.wait(*args)

    def all_reduce(*args, **kwargs):
        order.append("start")
        work = real(*args, **kwargs)
        if work is None:
            order.append("wait")
        return None if work is None else Handle(work)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func._schema.name
            if name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm") and isinstance(out, torch.Tensor):
                order.append({weight.numel(): "dw", x.numel(): "dx"}.get(out.numel(), "other"))
            return out

    dist.all_reduce = all_reduce
    with Watch():
        dx, dw = exercise.column_backward(dy, x, weight, tp)
    return {"order": order} if watch else {"dx": dx, "dw": dw}


def _gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    return [{"dx": p["dx"], "dw": p["dw"]} for p in _column([{**r, "bias": None} for r in ranks])]


def _own_gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear({**r, "bias": None}) for r in ranks]
    return [{"dx": p["dx"], "dw": p["dw"]} for p in parts]


def _everything_summed(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _gradients(ranks)
    total = torch.stack([one["dw"] for one in right]).sum(0)
    return [{"dx": one["dx"], "dw": total} for one in right]


def _backward_inputs(watch: bool) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        s, b, i, o = draw.integer(2, 3), draw.integer(2, 3), draw.integer(3, 6), draw.integer(10, 14)  # o != s*b
        x = draw.tensor(s, b, i)
        return [
            {"dy": draw.tensor(s, b, o), "x": x.clone(), "weight": draw.tensor(o, i), "watch": watch} for _ in range(2)
        ]

    return inputs


def _travels_while_computing(answer: Answer) -> str | None:
    for rank, value in enumerate(answer.value):
        order = value["order"]
        if "start" not in order:
            return f"rank {rank} starts no dist.all_reduce"
        if "dw" not in order:
            return f"rank {rank} computes no matrix product of the shape of dW"
        start, dw = order.index("start"), order.index("dw")
        if dw < start:
            return f"rank {rank} computes dW before the all-reduce of dx has started"
        if "wait" not in order:
            return f"rank {rank} never waits for the all-reduce"
        if order.index("wait") < dw:
            return f"rank {rank} waits for the all-reduce before it computes dW"
    return None


_OVERLAP = Exercise(
    "column_backward",
    drive=_drive_overlap,
    cases=[
        Case("dx and dW", _backward_inputs(False), points=2, hidden=True, reference=_gradients),
        Case("only dx travels", _backward_inputs(False), hidden=True, reference=_gradients,
             accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", _nbytes_of("x"))]),
        Case("dx travels while dW is computed", _backward_inputs(True), points=3, hidden=True,
             accept=[_travels_while_computing]),
    ],
    mistakes=[
        Mistake(_own_gradients, "dx is a share: sum it over ranks."),
        Mistake(_everything_summed, "Each rank's dW belongs to its own rows: it is complete, do not sum it."),
    ],
    hint="Four steps in this order: dx = dy @ weight; handle = dist.all_reduce(dx, group=tp.group, async_op=True); "
    "dW from dy and x; handle.wait().",
)  # fmt: skip

# --------------------------------------------------------------------------------------------- 12 initial values


def initial_part(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank].contiguous()


def _local_draw(by_rank: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    def answer(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
        local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
        own = seed if dim is None else by_rank(seed, tp_rank)
        return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std

    return answer


def _a_matrix(dim: int | None) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        t = draw.choice([2, 4])
        shape = [t * draw.integer(1, 6), t * draw.integer(1, 6)]
        return {
            "shape": shape, "dim": dim, "tp_rank": draw.integer(1, t - 1), "tp_size": t,
            "seed": draw.integer(0, 10**6), "std": draw.integer(1, 9) / 100,
        }  # fmt: skip

    return inputs


_INITIAL = Exercise(
    "initial_part",
    reference=initial_part,
    cases=[
        Case("a column layer, rank 1 of 2",
             {"shape": [4, 2], "dim": 0, "tp_rank": 1, "tp_size": 2, "seed": 1, "std": 0.02}),
        Case("cut along dim 0", _a_matrix(0), hidden=True),
        Case("cut along dim 1", _a_matrix(1), hidden=True),
        Case("replicated", _a_matrix(None), hidden=True),
    ],
    mistakes=[
        Mistake(_local_draw(lambda seed, rank: seed), "The same seed and the same shape on every rank: equal shards."),
        Mistake(
            _local_draw(lambda seed, rank: seed + rank),
            "The shards differ now, but they are no parts of the serial matrix: the model changes with tp.",
        ),
    ],
    hint="Draw the whole matrix from the seed on every rank, times std, and keep this rank's block along dim.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- 13 questions


def answers(
    heads: int, groups: int, ffn: int, tp: int, rank: int, layers: int, hidden: int, vocab: int
) -> dict[str, Any]:
    mine = heads // tp
    queries = list(range(rank * mine, (rank + 1) * mine))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "payloads_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 4.5 * hidden,
    }


def _middle_cut(ffn: int, tp: int, rank: int, **_: int) -> list[list[int]]:
    return [[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]


def _wrong_answers(**changes: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return lambda **inputs: {**answers(**inputs), **{key: change(**inputs) for key, change in changes.items()}}


def _some_model(few: bool) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        groups = draw.choice([1, 2]) if few else draw.choice([8, 16])
        tp = draw.choice([4, 8])
        heads = tp * groups * draw.integer(1, 3) if few else groups * draw.integer(2, 4)
        return {
            "heads": heads, "groups": groups, "tp": tp, "rank": draw.integer(1, tp - 1),
            "layers": draw.integer(2, 96), "hidden": 64 * heads, "vocab": 1024 * draw.integer(30, 250),
            "ffn": 64 * tp * draw.integer(4, 40),
        }  # fmt: skip

    return inputs


_QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("Llama-3 70B, rank 5 of 8",
             {"heads": 64, "groups": 8, "ffn": 28672, "tp": 8, "rank": 5, "layers": 80, "hidden": 8192,
              "vocab": 128256}),
        Case("other models", _some_model(few=False), hidden=True),
        Case("fewer groups than ranks", _some_model(few=True), points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            _wrong_answers(kv_heads=lambda rank, groups, tp, **_: list(
                range(rank * groups // tp, rank * groups // tp + max(0, groups // tp)))),
            "With fewer groups than ranks several ranks use the same key/value head: query q uses group q // (a/g).",
        ),
        Mistake(
            _wrong_answers(gate_up_rows=_middle_cut),
            "One cut through the stack gives rank 0 only gates. A rank needs the same rows of both halves: two ranges.",
        ),
        Mistake(_wrong_answers(payloads_forward=lambda layers, **_: 2 * layers), "The embedding is summed too."),
        Mistake(
            _wrong_answers(payloads_forward=lambda layers, **_: 4 * layers + 1), "Forward only: two sums a layer."
        ),
        Mistake(
            _wrong_answers(logits_over_three=lambda vocab, **_: vocab / 3),
            "A ring all-reduce of n bytes sends twice what an all-gather of n bytes does.",
        ),
        Mistake(
            _wrong_answers(zero3_sends_less_from=lambda hidden, **_: 3 * hidden),
            "ZeRO-3 moves the weights three times: gathered forward and backward, gradients scattered.",
        ),
    ],
    hint="query heads: a/t of them from rank*a/t on. key/value heads: q // (a/g) of each. gate and up: rows "
    "r f/t to (r+1) f/t of the first half, and the same rows of the second. Forward: the embedding and "
    "two sums a layer. Ratio: s b V (an all-gather) to 2 * 3 s b. ZeRO-3: 3 * 12 h^2 = 8 b s h.",
)  # fmt: skip

LAB = Lab(
    "02_tensor_parallel",
    [
        _BYTES, _ACTIVATIONS, _COLUMN, _ROW, _QKV, _ATTENTION, _EMBEDDING, _LOSS, _SEQUENCE, _PARTIAL, _OVERLAP,
        _INITIAL, _QUESTIONS,
    ],
)  # fmt: skip
