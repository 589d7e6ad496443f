"""Lab 02, a layer whose attention and MLP read one norm (PaLM, GPT-J): one all-reduce forward, one backward.

Every rank has its heads and its features of the MLP. Attention's heads are stood for by means over the tokens that a
token sees, as with queries that are 0: what they need is that tokens meet and ranks do not. `_one_process` is the layer
with all parts on one rank, the biases of the two row layers added once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import sends
from labkit.exercises import Case, Draw, Exercise

from .linear import Inputs, in_whole_numbers


def _drive(exercise: Any, x: Any, dy: Any, tp: Any, **pairs: Any) -> dict[str, Any]:
    """Run the learner's layer; its gradients are named dx, and `dnorm weight`, `dnorm bias` and so on."""

    def heads(features: Any) -> Any:
        seen = features.new_ones(len(features)).cumsum(0)
        return features.cumsum(0) / seen[:, None, None]

    leaves = {"dx": x}
    for name in ("norm", "qkv", "proj", "fc1", "fc2"):
        leaves |= {f"d{name} weight": pairs[name][0], f"d{name} bias": pairs[name][1]}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = exercise.parallel_layer(x, *(tuple(pairs[name]) for name in ("norm", "qkv", "proj", "fc1", "fc2")), heads, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
        y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _one_process(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    first, t = ranks[0], len(ranks)
    shared = [first["x"], *first["norm"], first["proj"][1], first["fc2"][1]]
    x, w, c, proj_bias, fc2_bias = (one.clone().requires_grad_() for one in shared)
    cut = {  # the whole tensor, and the dim along which ranks have parts of it
        "dqkv weight": (torch.cat([r["qkv"][0] for r in ranks]), 0),
        "dqkv bias": (torch.cat([r["qkv"][1] for r in ranks]), 0),
        "dproj weight": (torch.cat([r["proj"][0] for r in ranks], 1), 1),
        "dfc1 weight": (torch.cat([r["fc1"][0] for r in ranks]), 0),
        "dfc1 bias": (torch.cat([r["fc1"][1] for r in ranks]), 0),
        "dfc2 weight": (torch.cat([r["fc2"][0] for r in ranks], 1), 1),
    }
    for whole, _ in cut.values():
        whole.requires_grad_()
    z = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * w + c
    features = z @ cut["dqkv weight"][0].mT + cut["dqkv bias"][0]
    seen = torch.ones(len(x), len(x), dtype=x.dtype).tril()
    mixed = torch.einsum("st,tbf->sbf", seen / seen.sum(1, keepdim=True), features)
    inner = F.gelu(z @ cut["dfc1 weight"][0].mT + cut["dfc1 bias"][0])
    y = x + mixed @ cut["dproj weight"][0].mT + proj_bias + inner @ cut["dfc2 weight"][0].mT + fc2_bias
    y.backward(first["dy"])
    both = {"y": y.detach(), "dx": x.grad, "dnorm weight": w.grad, "dnorm bias": c.grad, "dproj bias": proj_bias.grad,
            "dfc2 bias": fc2_bias.grad}  # fmt: skip
    parts = {name: whole.grad.chunk(t, dim) for name, (whole, dim) in cut.items() if whole.grad is not None}
    return [{**both, **{name: part[r] for name, part in parts.items()}} for r in range(t)]


def _layer(t: int = 0, scale: float = 0.7) -> Callable[[Draw], Inputs]:
    """Draw inputs on `t` ranks, by default 2 or 3; all sizes differ, so that none can stand for another."""

    def inputs(draw: Draw) -> Inputs:
        (s, b), h, n, f = draw.shape(2, 2, 5), draw.choice([6, 8]), draw.integer(2, 4), draw.choice([5, 7])
        same = {"x": draw.tensor(s, b, h), "dy": draw.tensor(s, b, h), "norm": [draw.tensor(h), draw.tensor(h)]}
        biases = {"proj": draw.tensor(h), "fc2": draw.tensor(h)}

        def copied(value: Any) -> Any:
            return [one.clone() for one in value] if isinstance(value, list) else value.clone()

        return [
            {
                **{name: copied(value) for name, value in same.items()},
                "qkv": [scale * draw.tensor(n, h), draw.tensor(n)],
                "proj": [scale * draw.tensor(h, n), biases["proj"].clone()],
                "fc1": [scale * draw.tensor(f, h), draw.tensor(f)],
                "fc2": [scale * draw.tensor(h, f), biases["fc2"].clone()],
            }
            for _ in range(t or draw.integer(2, 3))
        ]

    return inputs


def _by_hand() -> Inputs:
    """One token, 1 and 3, whose norm is -1 and 1; the branches give 1 and 2 on rank 0, 10 and 20 on rank 1, and the
    biases of the row layers are 100 and 1000. The MLP's features are 0, and so are its results."""

    def rank(value: float) -> dict[str, Any]:
        pairs = {
            "norm": [torch.ones(2), torch.zeros(2)],
            "qkv": [torch.tensor([[0.0, value]]), torch.zeros(1)],
            "proj": [torch.tensor([[1.0], [2.0]]), torch.full((2,), 100.0)],
            "fc1": [torch.zeros(1, 2), torch.zeros(1)],
            "fc2": [torch.ones(2, 1), torch.full((2,), 1000.0)],
        }
        return {"x": torch.tensor([[[1.0, 3.0]]]), "dy": torch.tensor([[[1.0, 0.0]]]), **pairs}

    return [rank(1.0), rank(10.0)]


ONE_SUM = Exercise(
    "parallel_layer",
    reference=_one_process,
    drive=_drive,
    axis="tp",
    cases=[
        Case("x 1, 3; attention gives 1, 2 on rank 0 and 10, 20 on rank 1; biases 100 and 1000; then 3 ranks",
             _by_hand(), fixed=[in_whole_numbers(_layer(3))]),
        Case("other sizes, 3 ranks: y and all gradients", _layer(3), points=2, hidden=True),
        Case("right numbers, and one sum forward and one backward", _layer(), points=2, hidden=True,
             accept=[sends("all_reduce", times=2, at_most=("y and dx", lambda i: 2 * i[0]["x"].nbytes))]),
    ],
    idea="A sum of two sums is one sum. Which tensor is the last that every rank has whole and alike before the ranks' "
    "work departs, and which the first after it?",
    hint="The norm's output goes through f once, into both branches. Add the partial results of both row products, "
    "then g once. x and the two biases are the same on every rank: add them after the sum.",
    rtol=1e-3,
    atol=1e-4,
)  # fmt: skip
