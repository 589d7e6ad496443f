"""Checks of lab 07, second part: bytes that attention moves, and flash attention tile by tile from a memory that
counts.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import peak_at_most
from labkit.compare import difference
from labkit.exercises import Answer, Case, Draw, Exercise


def _keys_seen(s: int, rows: int, cols: int) -> list[int]:
    """The number of keys that each block of queries loads: whole blocks, up to the one with its last query."""
    return [-(-end // cols) * cols for end in range(rows, s + 1, rows)]


def flash_bytes(s: int, d: int, rows: int, cols: int, element_size: int) -> dict[str, int]:
    flash = 2 * s * d + s + 2 * d * sum(_keys_seen(s, rows, cols))
    return {"standard": (4 * s * s + 4 * s * d) * element_size, "flash": flash * element_size}


def _attention_sizes(draw: Draw) -> dict[str, Any]:
    rows, cols = 16 * draw.choice([1, 2, 4, 8]), 16 * draw.choice([1, 2, 4])
    return {
        "s": 128 * draw.integer(1, 30), "d": 32 * draw.integer(1, 4), "rows": rows, "cols": cols,
        "element_size": draw.choice([2, 4]),
    }  # fmt: skip


FLASH_BYTES = Exercise(
    "flash_bytes",
    reference=flash_bytes,
    cases=[
        Case("12 tokens, blocks of 4", {"s": 12, "d": 5, "rows": 4, "cols": 4, "element_size": 2}),
        Case("the picture: 4 queries against 3 keys", {"s": 12, "d": 5, "rows": 4, "cols": 3, "element_size": 2}),
        Case("other sizes", _attention_sizes, hidden=True, points=2, fixed=[
            {"s": 16, "d": 3, "rows": 2, "cols": 8, "element_size": 1},
            {"s": 96, "d": 40, "rows": 6, "cols": 4, "element_size": 4},
            {"s": 60, "d": 7, "rows": 10, "cols": 4, "element_size": 2},
            {"s": 6, "d": 2, "rows": 3, "cols": 2, "element_size": 4},
            {"s": 8, "d": 5, "rows": 1, "cols": 4, "element_size": 2}]),
    ],
    idea="Look at the picture of the tiles: which keys does each block of queries load, and which tensors move once?",
    hint="standard: Q K^T reads 2 s d, writes s^2; softmax reads s^2, writes s^2; P V reads s^2 + s d, writes s d. "
    "flash: q, out and lse once; for each block of queries, K and V of all key blocks up to its last query.",
)  # fmt: skip


def _drive_tiles(exercise: Any, rows: int, cols: int, **tensors: Any) -> None:
    """Run the learner's loop on tensors in a memory that counts loads and stores."""
    from labkit.hbm import Memory
    from labkit.tools import note

    memory = Memory(**tensors)
    note("memory", memory.evidence())
    exercise.flash_tiles(memory, *tensors["q"].shape, rows, cols)


def _memory(answer: Answer) -> dict[str, Any]:
    """The loads and stores, and the final contents of the memory."""
    [found] = answer.evidence[0].notes["memory"]
    return dict(found)


_CLOSE = 1e-3, 1e-4  # float32 keeps 7 decimal digits: of scores in the hundreds few lie behind the point


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, power: float = 0.5, seen: Any = None,
    zero: Any = None, score: float = 0.0,
) -> Any:  # fmt: skip
    """out and lse by the formula, in float64.

    Args:
        power: mistake: another power of d.
        seen: mistake: the keys that are visible.
        zero: mistake: the scores that are 0 in place of -inf.
    """
    q, k, v = q.double(), k.double(), v.double()
    s = q @ k.T / q.shape[1] ** power
    if zero is not None:
        s = s.masked_fill(zero, score)
    if causal:
        s = s.masked_fill(~(torch.ones_like(s).tril().bool() if seen is None else seen), -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def _added_up(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, cols: int, shrinks: str = "lo", wrong: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mistaken out and lse, block by block in float64.

    Args:
        shrinks: what is rescaled when m grows: "o", "l" or both.
        wrong: "divides": o is divided by l at every block; "goes on": m, l and o of a block of queries go on with the
            next.
    """
    q, k, v = q.double(), k.double(), v.double()
    places, outs, lses = torch.arange(len(q)), [], []
    begin = torch.full((rows, 1), -torch.inf).double(), torch.zeros(rows, 1), torch.zeros_like(q[:rows])
    m, total, o = begin
    for first in range(0, len(q), rows):
        here = slice(first, first + rows)
        m, total, o = (m, total, o) if wrong == "goes on" else begin
        for start in range(0, first + rows, cols):
            there = slice(start, start + cols)
            scores = q[here] @ k[there].T / q.shape[1] ** 0.5
            scores = scores.masked_fill(places[there] > places[here, None], -torch.inf)
            higher = torch.maximum(m, scores.amax(1, keepdim=True))
            p, shrink = torch.exp(scores - higher), torch.exp(m - higher)
            total = total * (shrink if "l" in shrinks else 1) + p.sum(1, keepdim=True)
            o, m = o * (shrink if "o" in shrinks else 1) + p @ v[there], higher
            o = o / total if wrong == "divides" else o
        outs.append(o if wrong == "divides" else o / total)
        lses.append((m + total.log())[:, 0])
    return torch.cat(outs), torch.cat(lses)


def _top(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The largest score of each query."""
    scores = q @ k.T / q.shape[1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).amax(1)


def _without_weight(q: torch.Tensor, k: torch.Tensor, rows: int) -> torch.Tensor:
    """The queries whose weights are all 0 when a block of queries shares one m."""
    top = _top(q, k)
    return torch.exp(top - top.view(-1, rows).amax(1).repeat_interleave(rows)) == 0


def _lost(q: torch.Tensor, k: torch.Tensor, start: float, grows: bool) -> torch.Tensor:
    """The queries for which e^(score - m) is 0 for all keys, or infinite for one, when m begins at `start`."""
    top = _top(q, k)
    m = top.clamp(min=start) if grows else torch.full_like(top, start)
    highest = torch.exp(top - m)
    return (highest == 0) | highest.isinf()


def _right(answer: Answer) -> str | None:
    got, i = _memory(answer)["tensors"], answer.inputs
    q, k, v = i["q"], i["k"], i["v"]
    want, lse = (t.float() for t in attention(q, k, v))
    if difference(got["out"], want, *_CLOSE):
        last = torch.tensor(_keys_seen(len(q), i["rows"], i["cols"])).repeat_interleave(i["rows"])[:, None]
        places = torch.arange(len(q))
        loaded, inside = places < last, places % i["cols"] <= (places % i["rows"])[:, None]
        for how, why in (({"seen": loaded}, "inside of a block too a key may come after the query: -inf there"),
                         ({"causal": False}, "a query sees keys up to itself, no later one"),
                         ({"seen": loaded, "zero": places > places[:, None], "score": -1e4}, "-1e4 is no -∞: here all "
                                                                                      "scores lie below it"),
                         ({"seen": loaded, "zero": places > places[:, None]}, "e^0 is 1: a hidden score of 0 still has "
                                                                             "a weight"),
                         ({"seen": loaded & inside}, "the mask compares places in the tile; a key comes after the "
                                                     "query by its place in the sequence"),
                         ({"power": 1.0}, "the scores are divided by sqrt(d), not by d"),
                         ({"power": 0.0}, "the scores are divided by sqrt(d)")):  # fmt: skip
            if not difference(got["out"], attention(q, k, v, **how)[0].float(), *_CLOSE):
                return why
        for steps, why in (
            ({"shrinks": "l"}, "o was added up under the old maximum, and is not rescaled when m grows"),
            ({"shrinks": "o"}, "l was added up under the old maximum, and is not rescaled when m grows"),
            ({"shrinks": ""}, "l and o were added up under the old maximum, and are not rescaled when m grows"),
            (
                {"wrong": "divides"},
                "o is divided by l at every block, and the next block adds to it: divide at the end",
            ),
            ({"wrong": "goes on"}, "m, l and o go on from one block of queries to the next"),
        ):
            if not difference(got["out"], _added_up(q, k, v, i["rows"], i["cols"], **steps)[0].float(), *_CLOSE):
                return f"out is wrong: {why}"
        if not difference(got["out"], want * torch.exp(lse - _top(q, k))[:, None], *_CLOSE):
            return "out is wrong: it is o, which is still to be divided by l"
        if got["out"].isnan().any():
            for start, grows, why in (
                (0.0, True, "m began at 0, and all scores of a query are far below: begin at -∞"),
                (0.0, False, "e^score is no number of float32 here: subtract the largest score first"),
            ):
                if torch.equal(got["out"].isnan().any(1), _lost(q, k, start, grows)):
                    return f"out has NaN: {why}"
            if _memory(answer)["stored"]["out"] < q.numel():
                return "out has NaN: some of its rows were never stored"
            nan = got["out"].isnan().any(1)
            if torch.equal(nan, _without_weight(q, k, i["rows"])):
                return "out has NaN: m is one number for a whole block; queries with far lower scores lose all weights"
            if torch.equal(nan, places < last[:, 0] - i["cols"]):
                return "out has NaN: -inf minus -inf was computed, where a query sees no key of a block"
            return f"out has NaN, first of query {int(nan.nonzero()[0])}: 0/0, inf - inf or inf times 0 was computed"
        row = int((~torch.isclose(got["out"], want, *_CLOSE)).any(1).nonzero()[0])
        return f"out is wrong, first of query {row}"
    return "out is right, lse is wrong: it is m + log l" if difference(got["lse"], lse, *_CLOSE) else None


def _moves(answer: Answer) -> str | None:
    """Check that exactly the predicted bytes are moved: more is waste, and fewer need more room than the chip has."""
    got, i = _memory(answer), answer.inputs
    s, d = i["q"].shape
    keys = d * sum(_keys_seen(s, i["rows"], i["cols"]))
    for name in ("out", "lse"):
        if got["loaded"][name]:
            return f"{name} is loaded: keep it on the chip until it is complete, and store it once"
    want = {"loaded": {"q": s * d, "k": keys, "v": keys}, "stored": {"out": s * d, "lse": s}}
    for what, table in want.items():
        for name, right in table.items():
            if got[what][name] > right:
                return f"{name}: {got[what][name]} numbers are {what}; {right} are enough"
            if got[what][name] < right:
                why = ""
                if what == "loaded" and name != "q":
                    cut = got[what][name] == d * sum(range(i["rows"], s + 1, i["rows"]))
                    why = (": a block of keys is loaded whole, with those after the last query" if cut else
                           ": each block of queries loads its keys and values again, as the chip has no room to keep "
                           "them")  # fmt: skip
                return f"{name}: {got[what][name]} numbers are {what}, predicted are {right}{why}"
    return None


def _chip(inputs: dict[str, Any]) -> int:
    """The size of the chip: twice the bytes of a handful of tiles, and half of K and V for a block of queries."""
    return int(inputs["k"].nbytes)


def _inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, cols: int) -> dict[str, Any]:
    """The tensors, with room for the results, which is filled with NaN."""
    empty = {"out": torch.full_like(q, torch.nan), "lse": torch.full_like(q[:, 0], torch.nan)}
    return {"q": q, "k": k, "v": v, **empty, "rows": rows, "cols": cols}


def _tiles(scale: float = 1.0, equal: bool = False, rows: int = 0, cols: int = 0, s: int = 0) -> Any:
    def inputs(draw: Draw) -> dict[str, Any]:
        m = rows or draw.choice([4, 8])
        n = m if equal else cols or draw.choice([4, 8, 16])
        return _of_size(draw, s or 16 * draw.integer(2, 3), draw.integer(2, 8), m, n, scale)

    return inputs


def _of_size(draw: Draw, s: int, d: int, rows: int, cols: int, scale: float = 1.0) -> dict[str, Any]:
    return _inputs(scale * draw.tensor(s, d), draw.tensor(s, d), draw.tensor(s, d), rows, cols)


def _low_scores(draw: Draw) -> dict[str, Any]:
    """Draw scores far below 0, so that a maximum that begins at 0 is found. Those of the last query lie far above, so
    that a missing maximum is found."""
    inputs = _of_size(draw, 32, 3, 4, 8)
    inputs["q"][:, 0], inputs["k"][:, 0] = -60.0, 5.0
    inputs["q"][-1, 0] = 60.0
    return inputs


def _far_below(draw: Draw) -> dict[str, Any]:
    """Draw scores that are all -32768: a substitute for -∞ must be far lower.

    All weights are equal and there is one block of keys, so the result does not depend on how such scores are rounded.
    """
    inputs = _of_size(draw, 16, 4, 4, 16)
    for name, first in (("q", -256.0), ("k", 256.0)):
        inputs[name] = torch.zeros_like(inputs[name])
        inputs[name][:, 0] = first
    return inputs


def _long(draw: Draw) -> dict[str, Any]:
    return _of_size(draw, 256, 64, 16, 16)


_FIXED = _inputs(
    torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-1.0, 0.0]]),
    torch.tensor([[1.0, 0.0], [0.0, 1.0], [4.0, 0.0], [0.0, 2.0]]),
    torch.arange(8.0).view(4, 2), 2, 2,
)  # fmt: skip

FLASH_TILES = Exercise(
    "flash_tiles",
    drive=_drive_tiles,
    changes=("out", "lse"),
    accept=[_right],
    cases=[
        Case("4 tokens, blocks of 2", _FIXED),
        Case("other sizes, square blocks", _tiles(equal=True), hidden=True),
        Case("blocks of any shape", _tiles(), hidden=True, fixed=[
            _tiles(rows=4, cols=16, s=48), _tiles(rows=8, cols=2, s=32), _tiles(rows=6, cols=4, s=36),
            _tiles(rows=1, cols=4, s=8), _tiles(rows=3, cols=2, s=12)]),
        Case("scores in the hundreds", _tiles(100.0), hidden=True, fixed=[_low_scores, _far_below]),
        Case("as many numbers move as predicted", _tiles(), hidden=True, points=2, accept=[_moves], fixed=[
            _tiles(rows=4, cols=16, s=48), _tiles(rows=8, cols=4, s=32)]),
        Case("a chip with room for as many numbers as K has", _long, hidden=True, accept=[
            _moves, peak_at_most("the chip's room, s·d numbers of 4 bytes as in K,", _chip)]),
    ],
    idea="Follow one query through two blocks of keys: which keys count, what is loaded, what a new maximum "
    "does to l and o.",
    hint="for each block of queries: load q; m = -inf, l = 0, o = 0. For each block of keys that begins at or before "
    "the last query: load k, v; S = q k^T / sqrt(d), -inf where the key comes after the query; m' = max(m, rowmax S); "
    "p = exp(S - m'); l = l exp(m - m') + rowsum p; o = o exp(m - m') + p v. Then store o / l and m + log l.",
)  # fmt: skip
EXERCISES = [FLASH_BYTES, FLASH_TILES]
