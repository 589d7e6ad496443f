"""Lab 11, LoRA over tp: what is added to a column layer and to a row layer, and each gradient of it.

`_whole` puts the ranks' parts together, computes the product of the whole matrices by the formula, and cuts again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import sends
from labkit.exercises import Case, Draw, Exercise

Inputs = list[dict[str, Any]]


def _drive(exercise: Any, x: Any, a: Any, b: Any, scale: float, dy: Any, kind: str, tp: Any) -> dict[str, Any]:
    leaves = {"dx": x, "da": a, "db": b}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = getattr(exercise, f"{kind}_adapter")(x, a, b, scale, tp)
    if y.shape == dy.shape and y.requires_grad:  # else there is nothing to go back from; y says so
        y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _whole(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    first, t, scale = ranks[0], len(ranks), ranks[0]["scale"]
    column = first["kind"] == "column"

    def joined(name: str, dim: int) -> torch.Tensor:
        return torch.cat([r[name] for r in ranks], dim)

    x = first["x"] if column else joined("x", -1)
    a = first["a"] if column else joined("a", 1)
    b = joined("b", 0) if column else first["b"]
    dy = joined("dy", -1) if column else first["dy"]
    u, du = torch.einsum("sbi,ri->sbr", x, a), scale * torch.einsum("sbo,or->sbr", dy, b)
    found = {
        "y": scale * torch.einsum("sbr,or->sbo", u, b), "dx": torch.einsum("sbr,ri->sbi", du, a),
        "da": torch.einsum("sbr,sbi->ri", du, x), "db": scale * torch.einsum("sbo,sbr->or", dy, u),
    }  # fmt: skip
    cut = {"y": -1, "db": 0} if column else {"dx": -1, "da": 1}
    return [
        {name: value.chunk(t, cut[name])[rank].contiguous() if name in cut else value for name, value in found.items()}
        for rank in range(t)
    ]


def _some(kind: str, t: int = 0) -> Callable[[Draw], Inputs]:
    """Draw inputs on `t` ranks, by default 2 or 3; all sizes differ."""

    def inputs(draw: Draw) -> Inputs:
        s, b, i, o, r = draw.shape(5, 2, 7)
        x, dy = draw.tensor(s, b, i), draw.tensor(s, b, o)
        whole = draw.tensor(r, i) if kind == "column" else draw.tensor(o, r)
        scale, out = draw.choice([0.5, 2.0, 4.0]), []
        for _ in range(t or draw.integer(2, 3)):
            mine = {"scale": scale, "kind": kind}
            if kind == "column":
                mine |= {"x": x.clone(), "a": whole.clone(), "b": draw.tensor(o, r), "dy": draw.tensor(s, b, o)}
            else:
                mine |= {"x": draw.tensor(s, b, i), "a": draw.tensor(r, i), "b": whole.clone(), "dy": dy.clone()}
            out.append(mine)
        return out

    return inputs


def _by_hand(kind: str) -> Inputs:
    """One token of two features and r = 1: the numbers of the lab's text, and dy = 1 everywhere."""
    x, one = torch.tensor([[[1.0, 2.0]]]), {"scale": 2.0, "kind": kind}
    if kind == "column":
        a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0], [6.0]])
        return [{**one, "x": x.clone(), "a": a.clone(), "b": b[r : r + 1].clone(), "dy": torch.ones(1, 1, 1)}
                for r in range(2)]  # fmt: skip
    a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0], [6.0]])
    return [{**one, "x": x[..., r : r + 1].clone(), "a": a[:, r : r + 1].clone(), "b": b.clone(),
             "dy": torch.ones(1, 1, 2)} for r in range(2)]  # fmt: skip


_THIN = sends(
    "all_reduce", times=1, at_most=("r numbers a token", lambda i: i[0]["x"][..., 0].nbytes * i[0]["b"].shape[1])
)
ADAPTER = Exercise(
    "adapter",
    function="column_adapter",
    reference=_whole,
    drive=_drive,
    axis="tp",
    outputs=("y", "dx", "da", "db"),
    cases=[
        Case("a column layer: x = (1 2), A = (3 4), B = 5 and 6; dy = 1", _by_hand("column")),
        Case("a row layer: the same numbers, cut the other way", _by_hand("row")),
        Case("other column layers: y and all gradients", _some("column", 3), points=2, hidden=True, fixed=[
            _some("column", 2)]),
        Case("other row layers: y and all gradients", _some("row", 3), points=2, hidden=True, fixed=[_some("row", 2)]),
        Case("right numbers, and r numbers a token travel, once", _some("column"), hidden=True, accept=[_THIN], fixed=[
            _some("row", 2)]),
    ],
    errors={"shapes cannot be multiplied": "A is [r, i] and B is [o, r], as PyTorch stores a weight: out, in."},
    idea="Write u for the r numbers of a token. On each rank: is u whole or a share? Is the gradient of u whole or a "
    "share?",
    hint="column: u = F.linear(x, a), then f (copy_to_region), then B's product: the gradient of u is summed. row: "
    "u = F.linear(x, a) is a share, so g (reduce_from_region) on u, then B's product. Times scale.",
)  # fmt: skip
