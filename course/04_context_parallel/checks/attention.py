"""Lab 04, one rank's mathematics: attention block by block, the merge of two pieces, the gradient of a piece.

Tensors have no batch dim: q is [a, n, d], a heads, n tokens, d wide. Who sees whom follows from places in the sequence:
a query at place i sees a key at place j when j <= i. So one function serves every cut of the sequence. References work
by the formula in float64 and cast back; lse is the logarithm of a row's sum of exp(score).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import no_tensor_above
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# ------------------------------------------------------------------------------------- attention by the formula


def _scores(q: torch.Tensor, k: torch.Tensor, q_at: Any, k_at: Any, scaled: bool = True, causal: bool = True) -> Any:
    s = q @ k.mT / (math.sqrt(q.shape[-1]) if scaled else 1.0)
    return s.masked_fill(q_at[:, None] < k_at[None, :], -torch.inf) if causal else s


def dense(q: Any, k: Any, v: Any, q_at: Any, k_at: Any, **how: bool) -> Pair:
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
    out, lse = dense(**inputs)
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), torch.nan), lse


def products(answer: Answer) -> list[int]:
    """Multiply-adds of each rank's matrix products."""
    return [sum(much for what, much in one.order if what == "matmul") for one in answer.evidence]


def _skips(answer: Answer) -> str | None:
    i = answer.inputs
    bound = 2 * i["q"].numel() * 2 * i["block"]  # Q K^T and P V over two blocks of four
    done = products(answer)[0]
    return f"{done} multiply-adds; {bound} are enough, as two of the four blocks are hidden" if done > bound else None


_FIXED = {
    "q": torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), "k": torch.tensor([[[1.0, 1.0], [0.0, 1.0], [3.0, 0.0]]]),
    "v": torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]]), "q_at": torch.tensor([1, 2]),
    "k_at": torch.tensor([0, 1, 2]), "block": 1,
}  # fmt: skip

ATTEND = Exercise(
    "attend",
    reference=lambda block, **inputs: dense(**inputs),
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
        Mistake(lambda block, **i: dense(**i, scaled=False), "The scores are divided by sqrt(d)."),
        Mistake(lambda block, **i: dense(**i, causal=False), "A query at place i sees keys at places j <= i only."),
        Mistake(_nothing_is_nan, "A query that sees nothing: -inf minus -inf and 0 / 0 are no numbers. Its out is 0."),
        Mistake(_plain_exp, "exp of a large score overflows: subtract the running maximum first."),
        Mistake(_never_rescaled, "When the maximum grows, what was summed before shrinks by exp(m_old - m_new)."),
    ],
    hint="For each block of keys: scores/sqrt(d), -inf where k_at > q_at; m' = max(m, rowmax); shrink l and O by "
    "exp(m - m'), add exp(S - m'). At the end O / l and m + log l. -inf minus -inf is no number: where m' is "
    "-inf use 0. Skip a block whose first key comes after the last query.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------- merge


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> Pair:
    total = torch.logaddexp(lse.double(), more_lse.double())
    finite = total.masked_fill(total == -torch.inf, 0.0)
    a, b = (torch.exp(x.double() - finite).unsqueeze(-1) for x in (lse, more_lse))
    return (a * out + b * more).to(out.dtype), total.to(lse.dtype)


def _naive_merge(out: Any, lse: Any, more: Any, more_lse: Any) -> Any:
    a, b = lse.exp().unsqueeze(-1), more_lse.exp().unsqueeze(-1)
    return (a * out + b * more) / (a + b), (a + b).log().squeeze(-1)


def _nothing_merged(**pieces: Any) -> Pair:
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

MERGE = Exercise(
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
    out, lse = dense(q, k, v, q_at, k_at)
    keys = slice(m // 3, None)
    return {
        "dout": dout, "q": q, "k": k[:, keys].clone(), "v": v[:, keys].clone(), "out": out, "lse": lse, "q_at": q_at,
        "k_at": k_at[keys].clone(),
    }  # fmt: skip


def _all_keys(draw: Draw) -> dict[str, Any]:
    a, n, d = draw.integer(1, 3), draw.integer(3, 6), draw.integer(2, 5)
    q, k, v, dout = (draw.tensor(a, n, d) for _ in range(4))
    at = torch.arange(n)
    out, lse = dense(q, k, v, at, at)
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "q_at": at, "k_at": at.clone()}


PIECE = Exercise(
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
