"""Attention masks as rules: no table of s x s entries, and work only where something is visible.

At 128 k tokens a table of which query sees which key has 17 G entries, nearly all of which follow from three rules:

    query i sees key j   if   0 <= i - j  (causal),   |i - j| < window,   document(i) = document(j)

For two consecutive pieces of the sequence, queries [a, b) and keys [c, d), the smallest and the largest distance
i - j decide whether a table is needed:

| relation   | which pairs are visible              | how it is computed                    |
|------------|--------------------------------------|---------------------------------------|
| `NONE`     | none                                 | not at all                            |
| `FULL`     | all                                  | attention without a mask              |
| `DIAGONAL` | key not after query, same piece      | causal attention                      |
| `PARTIAL`  | a window's edge, a document's border | blockwise, a small table for each block |

**Padding** is a document. An encoder's mask is not causal, and a row of n tokens that is filled up to s has two
documents, its tokens and its padding (`padded`): no token sees padding, and padding sees itself, so no query is without
a key, whose softmax would be 0 / 0. What comes out of padding counts nowhere, so neither does its gradient.

`tiles` cuts the queries and the keys of a step, each one or two pieces of the sequence, into as few rectangles as
possible. For zigzag pieces A (early) and B (late) these are the three cases of ring attention: the own block is one
causal square, of an earlier rank's block only its A is visible, a later rank's block is visible to B only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from minimegatron.comm.sequence import Spans
from minimegatron.kernels.blockwise import FULL, NONE, Span
from minimegatron.layers.recompute import numbers_of

DIAGONAL, PARTIAL = "diagonal", "partial"


@dataclasses.dataclass(frozen=True)
class Tile:
    """A rectangle of queries x keys.

    Attributes:
        rows, cols: the local queries and keys, as [start, stop).
        relation: `FULL`, `DIAGONAL` or `PARTIAL`.
        q_start, k_start: for `PARTIAL`, the positions of the first row and column in the sequence.
    """

    rows: Span
    cols: Span
    relation: str
    q_start: int = 0
    k_start: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMask:
    """The rule that says which query sees which key.

    Args:
        causal: a query sees no later key.
        window: keys at a distance of this or more are not seen; with 1 a token sees only itself.
        document_ids: [b, s] of the *whole* sequence; only keys with the query's own id are seen.
    """

    causal: bool = True
    window: int | None = None
    document_ids: torch.Tensor | None = None
    _cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)  # of all layers of a pass

    def windowed(self, window: int | None) -> AttentionMask:
        """The same rule with a layer's own window; None leaves it as it is."""
        return self if window in (None, self.window) else dataclasses.replace(self, window=window)

    def relation(self, q: Span, k: Span) -> str:
        """How the queries [a, b) see the keys [c, d), both given as positions in the sequence."""
        nearest, farthest = q[0] - (k[1] - 1), q[1] - 1 - k[0]  # of the signed distance i - j
        limit = float("inf") if self.window is None else self.window - 1
        least = 0 if self.causal else -limit
        if farthest < least or nearest > limit:
            return NONE
        documents = self._documents(q, k)
        if documents != FULL:
            return documents
        if nearest >= least and farthest <= limit:
            return FULL
        return DIAGONAL if self.causal and q == k and farthest <= limit else PARTIAL

    def table(self, q: Span, k: Span, device: torch.device | None = None) -> torch.Tensor:
        """[b or 1, 1, b - a, d - c] bool, True where the query (row) sees the key (column)."""
        distance = torch.arange(*q, device=device)[:, None] - torch.arange(*k, device=device)[None, :]
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        seen = seen[None, None]
        if self.document_ids is not None:
            of_q, of_k = self.document_ids[:, q[0] : q[1]], self.document_ids[:, k[0] : k[1]]
            seen = seen & (of_q[:, None, :, None] == of_k[:, None, None, :])
        return seen

    def plain(self, s: int) -> bool:
        """Whether causal or full attention over s tokens says the same, so that no table and no boundaries are
        needed."""
        return self.document_ids is None and (self.window is None or self.window >= s)

    def dense(self, s: int, device: torch.device | None = None) -> torch.Tensor | None:
        """The whole table; None where causal or full attention says the same."""
        if self.plain(s):
            return None
        key = "dense", s, self.window
        if key not in self._cache:
            self._cache[key] = self.table((0, s), (0, s), device)
        return self._cache[key]

    def boundaries(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """The first token of each document, [documents + 1] int32 on `device`, of all samples end to end; and the
        longest length.

        Computed once, on the CPU: on a GPU the count and the longest length would make the host wait in every layer.
        """
        if "boundaries" not in self._cache:
            borders, longest = cu_seqlens(self._ids())
            self._cache["boundaries"] = borders.to(device), longest
        return self._cache["boundaries"]  # type: ignore[no-any-return]

    def tiles(self, q_spans: Spans, k_spans: Spans) -> list[Tile]:
        """The rectangles in which queries at `q_spans` see keys at `k_spans`; local rows and columns follow the spans.

        The rectangles are disjoint, and every visible pair is in one of them.
        """
        plain = self.causal and self.document_ids is None
        length = sum(b - a for a, b in q_spans)
        if plain and q_spans == k_spans and (self.window is None or q_spans[-1][1] - q_spans[0][0] <= self.window):
            return [Tile((0, length), (0, length), DIAGONAL)]  # local order is the order of the sequence
        tiles: list[Tile] = []
        at_k = 0
        for k in k_spans:
            for piece in _cut_at(k, q_spans) if self.causal else [k]:
                columns = at_k + piece[0] - k[0], at_k + piece[1] - k[0]
                at_q = 0
                for q in q_spans:
                    relation = self.relation(q, piece)
                    if relation != NONE:
                        tiles.append(Tile((at_q, at_q + q[1] - q[0]), columns, relation, q[0], piece[0]))
                    at_q += q[1] - q[0]
            at_k += k[1] - k[0]
        return _merge(_merge(tiles, "rows"), "cols")

    def pairs(self, tiles: list[Tile]) -> int:
        """The number of (query, key) pairs that are computed and visible, for one sample."""
        total = 0
        for tile in tiles:
            n, m = tile.rows[1] - tile.rows[0], tile.cols[1] - tile.cols[0]
            if tile.relation == PARTIAL:
                total += int(
                    self.table((tile.q_start, tile.q_start + n), (tile.k_start, tile.k_start + m))[0].sum().item()
                )
            else:
                total += n * m if tile.relation == FULL else n * (n + 1) // 2
        return total

    def _documents(self, q: Span, k: Span) -> str:
        """The relation of a rectangle by document ids alone: `NONE`, `FULL` or `PARTIAL`."""
        if self.document_ids is None:
            return FULL
        of_q, of_k = self._range(q), self._range(k)
        if all(a_hi < b_lo or b_hi < a_lo for (a_lo, a_hi), (b_lo, b_hi) in zip(of_q, of_k, strict=True)):
            return NONE
        one = all(a == b and a[0] == a[1] for a, b in zip(of_q, of_k, strict=True))
        return FULL if one else PARTIAL

    def _range(self, span: Span) -> list[Span]:
        """Smallest and largest id of each sample in a piece of the sequence."""
        if span not in self._cache:
            ids = self._ids()[:, span[0] : span[1]]
            least, most = (numbers_of(x, lambda: [0] * len(ids)) for x in (ids.amin(1), ids.amax(1)))
            self._cache[span] = list(zip(least, most, strict=True))
        return self._cache[span]

    def _ids(self) -> torch.Tensor:
        """The document ids on the CPU: one copy from the device a pass, not one for each piece or layer."""
        assert self.document_ids is not None, "asked only where there are ids"
        if "ids" not in self._cache:
            self._cache["ids"] = self.document_ids.cpu()
        return self._cache["ids"]  # type: ignore[no-any-return]


def padded(lengths: torch.Tensor, s: int) -> torch.Tensor:
    """Document ids of rows that are filled up: lengths [b] -> [b, s] int64, 0 for a row's tokens, 1 for its padding."""
    return (torch.arange(s, device=lengths.device) >= lengths[:, None]).long()


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Boundaries of the documents of a batch laid end to end, for variable-length attention.

    Args:
        document_ids: [b, s] int64, as `data/gpt_dataset.make_batch` returns them.

    Returns:
        [documents + 1] int32 on the ids' device, from 0 to b*s; and the length of the longest document. On a GPU both
        make the host wait: an `AttentionMask` computes them once a pass.
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    boundaries = torch.cat((starts, starts.new_tensor([document_ids.numel()])))
    return boundaries.to(torch.int32), int(boundaries.diff().max())


def _cut_at(k: Span, q_spans: Spans) -> list[Span]:
    """`k` cut where a span of the queries begins or ends, so that causal masks are needed on squares alone."""
    inside = sorted({edge for q in q_spans for edge in q if k[0] < edge < k[1]})
    return list(zip([k[0], *inside], [*inside, k[1]], strict=True))


def _merge(tiles: list[Tile], along: str) -> list[Tile]:
    """Join adjacent `FULL` rectangles along one dim ("rows" or "cols") that are equal in the other."""
    across = "cols" if along == "rows" else "rows"
    out: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (getattr(t, across), getattr(t, along))):
        last = out[-1] if out else tile
        (start, end), (begin, stop) = getattr(last, along), getattr(tile, along)
        joins = last.relation == tile.relation == FULL and getattr(last, across) == getattr(tile, across)
        if joins and end == begin:
            whole = (start, stop)
            out[-1] = Tile(whole, tile.cols, FULL) if along == "rows" else Tile(tile.rows, whole, FULL)
        else:
            out.append(tile)
    return out
