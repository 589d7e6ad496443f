"""Lab 13, one recurrence in three forms: token by token, as attention with decays, chunk by chunk.

x is [s, heads, p], dt [s, heads], A [heads]; all heads share B and C [s, n]; a state is [heads, p, n]. The reference
is the sum written out in float64, and cast back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from labkit.checks import no_tensor_above
from labkit.exercises import Answer, Case, Draw, Exercise

Tensor = torch.Tensor


def written_out(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """y and the state after the last token."""
    of, (x, dt, A, B, C, h) = x.dtype, (t.double() for t in (x, dt, A, B, C, h))
    a = (dt * A).cumsum(0)
    later = torch.ones(len(x), len(x)).triu(1).bool()[..., None]
    left = (a[:, None] - a[None]).masked_fill(later, -torch.inf).exp()  # [i, j, heads]
    weights = left * (C @ B.mT)[..., None] * dt
    y = torch.einsum("ijh,jhp->ihp", weights, x) + torch.einsum("ih,hpn,in->ihp", a.exp(), h, C)
    state = a[-1].exp()[:, None, None] * h + torch.einsum("jh,jh,jhp,jn->hpn", left[-1], dt, x, B)
    return y.to(of), state.to(of)


def recurred(D: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    y, state = written_out(**inputs)
    return y + D[:, None] * inputs["x"], state


def attended(**inputs: Any) -> Tensor:
    x = inputs["x"]
    return written_out(**inputs, h=x.new_zeros(*x.shape[1:], inputs["B"].shape[1]))[0]


def chunked(size: int, **inputs: Any) -> tuple[Tensor, Tensor]:
    return written_out(**inputs)


def _drawn(draw: Draw, s: int = 0, also: str = "", strong: float = 1.0, sizes: Any = None) -> dict[str, Any]:
    """Inputs of s tokens, and those of D and h that are asked for; decays are `strong` times as strong."""
    heads, p, n = sizes or draw.shape(3, 2, 5)
    s = s or draw.integer(6, 11)
    found = {"x": draw.tensor(s, heads, p), "dt": 0.05 + 0.4 * draw.tensor(s, heads).abs(),
             "A": -strong * (0.2 + draw.tensor(heads).abs()),
             "B": draw.tensor(s, n), "C": draw.tensor(s, n)}  # fmt: skip
    more = {"D": draw.tensor(heads), "h": draw.tensor(heads, p, n)}
    return found | {name: more[name] for name in also}


def _double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _wide(of: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: _double(of(draw))


def _by_hand(*also: str, **numbers: float) -> dict[str, Any]:
    """The example: one head with p = n = 1 and A = -ln 2; dt 1, 1, 2, x 4, 2, 6, B = C = 1."""
    one = torch.ones(3, 1)
    given = {"x": torch.tensor([4.0, 2.0, 6.0]).view(3, 1, 1), "dt": torch.tensor([[1.0], [1.0], [2.0]]),
             "A": -torch.tensor([2.0]).log(), "B": one.clone(), "C": one.clone()}  # fmt: skip
    shapes = {"D": (1,), "h": (1, 1, 1)}
    return given | {name: torch.full(shapes[name], numbers[name]) for name in also}


_begun = partial(_drawn, also="Dh")
RECURRENCE = Exercise(
    "recurrence",
    reference=recurred,
    outputs=("y", "h"),
    cases=[
        Case("the example: y = 4, 4, 13; with D = 1 and h = 8 before it", _by_hand("D", "h", D=0.0, h=0.0),
             fixed=[_by_hand("D", "h", D=1.0, h=8.0)]),
        Case("other sizes", _begun, points=2, hidden=True, fixed=[
            partial(_begun, s=1), partial(_begun, strong=40.0), partial(_begun, sizes=(3, 3, 3))]),
        Case("float64", _wide(_begun), hidden=True),
    ],
    idea="In which order does a token fade, write and read the state?",
    hint="For each t: h = exp(dt[t] A)[:, None, None] h + (dt[t][:, None] x[t])[:, :, None] B[t]; y[t] = h @ C[t] + "
    "D[:, None] x[t]. Make a new h each time: the one given is the caller's.",
)  # fmt: skip


def _at_once(answer: Answer) -> str | None:
    """Check for fewer operations of torch than tokens."""
    done, tokens = answer.evidence[0].ops, len(answer.inputs["x"])
    return f"{done} operations of torch for {tokens} tokens: no loop over tokens" if done >= tokens else None


ATTENTION = Exercise(
    "as_attention",
    reference=attended,
    rtol=1e-3, atol=1e-4,  # of differences of sums in fp32; a wrong decay is off by more
    cases=[
        Case("the example: y = 4, 4, 13", _by_hand()),
        Case("other sizes", _drawn, points=2, hidden=True, fixed=[
            partial(_drawn, s=1), partial(_drawn, sizes=(4, 4, 4)), _wide(partial(_drawn, s=7))]),
        Case("40 tokens with strong decays", partial(_drawn, s=40, strong=12.0), hidden=True),
        Case("no loop over 150 tokens", partial(_drawn, s=150, strong=0.2), hidden=True, accept=[_at_once]),
    ],
    idea="What is left at token i of what token j wrote? It is one number for each head and pair: a matrix.",
    hint="a = cumsum of dt A over tokens; where j <= i the weight is exp(a_i - a_j) (C_i . B_j), else 0. Put -inf into "
    "the hidden differences before exp; then one product with dt x.",
)  # fmt: skip


def _several(draw: Draw, s: int, size: int, **how: Any) -> dict[str, Any]:
    return {**_drawn(draw, s, "h", **how), "size": size}


def _room(inputs: Any) -> float:
    x, size = inputs["x"], inputs["size"]
    return float(2 * x.shape[0] * x.shape[1] * size * x.element_size())


CHUNKED = Exercise(
    "chunked",
    reference=chunked,
    outputs=("y", "h"),
    rtol=1e-3, atol=1e-4,
    cases=[
        Case("the example in chunks of 2, with h = 8 before it: y = 8, 6, 13.5",
             {**_by_hand("h", h=8.0), "size": 2}, fixed=[{**_by_hand("h", h=0.0), "size": 1}]),
        Case("other sizes; the last chunk may be shorter", lambda draw: _several(draw, draw.integer(9, 14), 4),
             points=2, hidden=True, fixed=[
                 partial(_several, s=12, size=4), partial(_several, s=13, size=4), partial(_several, s=3, size=8),
                 partial(_several, s=7, size=1), _wide(partial(_several, s=11, size=3))]),
        Case("chunks of 48 tokens with strong decays", partial(_several, s=100, size=48, strong=12.0), hidden=True),
        Case("1,024 tokens in chunks of 128: few operations, and no state for each token",
             partial(_several, s=1024, size=128, strong=0.2, sizes=(2, 64, 64)), hidden=True, points=2, draws=1,
             accept=[_at_once, no_tensor_above("twice the weights within all chunks", _room)]),
    ],
    idea="What does a token of this chunk read that earlier chunks wrote? All of it is in one state, faded since.",
    hint="With a = cumsum of dt A in the chunk: y = as_attention of the chunk + exp(a_i) (h C_i); afterwards h = "
    "exp(a_last) h + sum over j of exp(a_last - a_j) dt_j x_j B_j^T, one product.",
)  # fmt: skip
