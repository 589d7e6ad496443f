"""Lab 04, pieces of an attention: two of them merged, and the gradient of one.

A piece is attention over some of the keys, with the logarithm of its own sum; the gradient of a piece is a term of the
whole one. As in `attention` references work by the formula in float64 and cast back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

from .attention import Pair, dense, scores_of

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# -------------------------------------------------------------------------------------------------------- merge


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> Pair:
    total = torch.logaddexp(lse.double(), more_lse.double())
    finite = total.masked_fill(total == -torch.inf, 0.0)
    a, b = (torch.exp(x.double() - finite).unsqueeze(-1) for x in (lse, more_lse))
    return (a * out + b * more).to(out.dtype), total.to(lse.dtype)


def _halves(scale: float = 1.0) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        a, n, d = draw.shape(3, 2, 5)
        return {
            "out": draw.tensor(a, n, d), "lse": scale * draw.tensor(a, n), "more": draw.tensor(a, n, d),
            "more_lse": scale * draw.tensor(a, n),
        }  # fmt: skip

    return inputs


def in_float64(inputs: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], dict[str, Any]]:
    """Return the same inputs in float64: what is computed in less is off by more than is allowed there."""
    return lambda draw: {
        name: one.double() if one.is_floating_point() else one for name, one in inputs(draw).items()
    }  # fmt: skip


def _nothing_yet(draw: Draw) -> dict[str, Any]:
    inputs = _halves()(draw)
    inputs["out"], inputs["lse"] = torch.zeros_like(inputs["out"]), torch.full_like(inputs["lse"], -torch.inf)
    inputs["more"][:, 0], inputs["more_lse"][:, 0] = 0.0, -torch.inf  # nothing in either
    return inputs


def _empty(side: str, lse: str) -> Callable[[Draw], dict[str, Any]]:
    """Return a draw in which one piece has seen no key in some rows, and the other has seen keys in all."""

    def inputs(draw: Draw) -> dict[str, Any]:
        pieces = _halves(30.0)(draw)
        pieces[side][:, ::2], pieces[lse][:, ::2] = 0.0, -torch.inf
        return pieces

    return inputs


def _of_one_size(pieces: dict[str, Any]) -> dict[str, Any]:
    """Return these pieces with out and more between 3 and 5.

    An lse of 1000 is off by 3e-5 in fp32, and so is a share. Where out and more are of one size, this is little beside
    the merged out, whether its formula is a sum of shares or out + share * (more - out).
    """
    return {**pieces, **{name: 4 + pieces[name].tanh() for name in ("out", "more")}}


def _thousands(draw: Draw) -> dict[str, Any]:
    return _of_one_size(_halves(1000.0)(draw))


def _far_apart(draw: Draw) -> dict[str, Any]:
    pieces = _of_one_size(_halves()(draw))
    far = torch.tensor([1000.0, -1000.0]).repeat(pieces["lse"].shape[1])[: pieces["lse"].shape[1]]
    return {**pieces, "lse": pieces["lse"] + far, "more_lse": pieces["more_lse"] - far.abs()}


_EVEN = {
    "out": torch.tensor([[[4.0, 0.0]]]), "lse": torch.tensor([[math.log(2.0)]]), "more": torch.tensor([[[8.0, 4.0]]]),
    "more_lse": torch.tensor([[math.log(6.0)]]),
}  # fmt: skip

MERGE = Exercise(
    "merge",
    reference=merge,
    outputs=("out", "lse"),
    cases=[
        Case("sums of 2 and 6", _EVEN),
        Case("other pieces, in float64 as well", _halves(), hidden=True, draws=2, fixed=[
            _halves(30.0), in_float64(_halves())]),
        Case("an lse of a thousand", _thousands, hidden=True, draws=2, fixed=[_far_apart]),
        Case("pieces that saw nothing", _nothing_yet, hidden=True, draws=1, fixed=[
            _empty("out", "lse"), _empty("more", "more_lse")]),
    ],
    idea="Each out was divided by its own sum. Which share of the new sum is that?",
    hint="lse_new = logaddexp(lse, more_lse); out = exp(lse - lse_new) out + exp(more_lse - lse_new) more. Where "
    "lse_new is -inf nothing was seen: take 0 in its place before you subtract.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ a piece, back


def piece_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, q_at: Any, k_at: Any) -> Triple:
    """The gradients of a piece by the formula in float64, cast back."""
    of, (dout, q, k, v, out, lse) = q.dtype, (t.double() for t in (dout, q, k, v, out, lse))
    p = torch.exp(scores_of(q, k, q_at, k_at) - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return (ds @ k).to(of), (ds.mT @ q).to(of), (p.mT @ dout).to(of)


def _piece_of(draw: Draw, q_at: list[int], k_at: list[int], piece: list[int]) -> dict[str, Any]:
    """The keys numbered `piece` of an attention, with the output and lse over all keys."""
    a, d = draw.shape(2, 2, 4)
    q, dout = draw.tensor(a, len(q_at), d), draw.tensor(a, len(q_at), d)
    k, v = draw.tensor(a, len(k_at), d), draw.tensor(a, len(k_at), d)
    at, keys_at = torch.tensor(q_at), torch.tensor(k_at)
    out, lse = dense(q, k, v, at, keys_at)
    return {
        "dout": dout, "q": q, "k": k[:, piece].clone(), "v": v[:, piece].clone(), "out": out, "lse": lse, "q_at": at,
        "k_at": keys_at[piece].clone(),
    }  # fmt: skip


def _some_keys(draw: Draw) -> dict[str, Any]:
    n, m = draw.integer(3, 6), draw.integer(6, 9)
    return _piece_of(draw, list(range(m - n + 1, m + 1)), list(range(m)), list(range(m // 3, m)))


def _all_keys(draw: Draw) -> dict[str, Any]:
    n = draw.integer(3, 6)
    return _piece_of(draw, list(range(n)), list(range(n)), list(range(n)))


def _zigzag_piece(draw: Draw) -> dict[str, Any]:
    """Draw the block of a later rank, which the early half of the queries does not see; its places are in no order."""
    return _piece_of(draw, [7, 0, 1, 6], [0, 5, 1, 2, 3, 7, 4, 6], [1, 3, 4, 6])


def _two_tokens() -> dict[str, Any]:
    q, k, v = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[1.0, 1.0], [0.0, 1.0]]]), torch.eye(2)[None]
    at = torch.arange(2)
    out, lse = dense(q, k, v, at, at)
    dout = torch.tensor([[[1.0, 0.0], [1.0, 2.0]]])
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "q_at": at, "k_at": at.clone()}


def one_query() -> dict[str, Any]:
    """Inputs with every score 0, so that P is 1/4: dV is 2, dS is v - 4, dQ 1 and dK v - 4, each in one place."""
    k, v = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    k[0, :, 1], v[0, :, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 4.0, 9.0, 1.0])
    q = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    return {"dout": 8 * q, "q": q, "k": k, "v": v, "out": 4 * q, "lse": torch.tensor([[math.log(4.0)]]),
            "q_at": torch.tensor([3]), "k_at": torch.arange(4)}  # fmt: skip


def _high_scores() -> dict[str, Any]:
    """`one_query` with every score 120: its exponential overflows in float32, that of S - lse does not."""
    inputs = one_query()
    k = inputs["k"].clone()
    k[0, :, 0] = 1.0
    return {**inputs, "q": 240 * inputs["q"], "k": k, "lse": inputs["lse"] + 120}


def _high_and_hidden() -> dict[str, Any]:
    """`_high_scores` with the last key hidden, whose score is 600: exp(S - lse) overflows where it is not masked."""
    inputs = _high_scores()
    q, k, v, at = inputs["q"], inputs["k"].clone(), inputs["v"], torch.tensor([2])
    k[0, 3, 0] = 5.0
    out, lse = dense(q, k, v, at, inputs["k_at"])
    return {**inputs, "k": k, "out": out, "lse": lse, "q_at": at}


PIECE = Exercise(
    "piece_backward",
    reference=piece_backward,
    outputs=("dq", "dk", "dv"),
    cases=[
        Case("one query and four keys, every score 0; two tokens", one_query(), fixed=[_two_tokens()]),
        Case("some of the keys: their terms of the sums", _some_keys, points=2, hidden=True, draws=2,
             fixed=[_zigzag_piece, _all_keys, _high_scores(), _high_and_hidden(), in_float64(_some_keys)]),
    ],
    idea="The mean of dP, weighted with P, is the sum of P (dout · v) over all keys. Take dout out of the sum: what is "
    "left?",
    hint="S = q k^T / sqrt(d), masked; P = exp(S - lse); dV = P^T dout; dP = dout v^T; "
    "dS = P (dP - rowsum(dout out)) / sqrt(d); dQ = dS k; dK = dS^T q.",
)  # fmt: skip
