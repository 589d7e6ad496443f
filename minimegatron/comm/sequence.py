"""Which tokens of a sequence a context-parallel rank holds.

The problem in a sentence: under a causal mask the last token looks at everything and the first at nothing, so ranks
that take one quarter of the sequence each have 1, 3, 5 and 7 sixteenths of the work, and all wait for the last.

Cut the sequence into 2C chunks and give rank r chunk r and its mirror image 2C-1-r. Every rank then has the same number
of visible pairs, exactly.

    C = 4, 16 tokens     rank 0: 0 1 . . . . . . . . . . . . 14 15
                         rank 1: . . 2 3 . . . . . . . . 12 13 . .
                         rank 2: . . . . 4 5 . . . . 10 11 . . . .
                         rank 3: . . . . . . 6 7 8 9 . . . . . . .

That is the cut over the ranks that exchange keys and values (`cp_outer`, C of them). Ranks that exchange *heads*
(`cp_inner`) each see the whole of what they share, so they cut the concatenation of the two chunks into consecutive
pieces; gathering those in rank order gives the tokens in order, without a permutation. With all-to-all alone C = 1.

Tokens, labels, loss mask and position ids are cut alike, after labels were shifted: a rank knows the label of its last
token although the token itself is on another rank. Document ids are *not* cut: a query must know the documents of keys
that come from other ranks, and ids are small. Nor are patches of pictures, of which a token knows its row
(`data/pictures`).

In Megatron-LM: `get_batch_on_this_cp_rank` in `megatron/core/utils.py`, which zigzags in every case and lets the
all-to-all put the tokens back into order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minimegatron.comm.collectives import all_gather
from minimegatron.errors import ConfigError

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh

Spans = tuple[tuple[int, int], ...]
NOT_CUT = ("document_ids", "pixels", "patches")


def spans_of(s: int, outer: tuple[int, int], inner: tuple[int, int] = (0, 1)) -> Spans:
    """The tokens of a rank: ascending, disjoint spans [start, stop) of the sequence.

    Args:
        s: tokens of the whole sequence.
        outer: (rank, size) on `cp_outer`, which cuts zigzag.
        inner: (rank, size) on `cp_inner`, which cuts the result into consecutive pieces.

    Raises:
        ConfigError: the size of the sequence does not allow this cut.
    """
    (r, size), (i, pieces) = outer, inner
    chunks = 2 * size if size > 1 else 1
    if s % chunks or (s // size) % pieces:
        raise ConfigError(
            f"a sequence of {s} tokens cannot be cut into {chunks} chunks for {size} rank(s) of a ring and then into "
            f"{pieces} pieces",
            fix=f"choose a multiple of 2*cp = {2 * size * pieces}",
        )
    n = s // chunks
    pair = [(r * n, (r + 1) * n), ((chunks - 1 - r) * n, (chunks - r) * n)] if size > 1 else [(0, s)]
    start, stop = i * (s // size // pieces), (i + 1) * (s // size // pieces)
    spans, before = [], 0
    for a, b in pair:
        first, last = max(start - before, 0), min(stop - before, b - a)
        if first < last:
            spans.append((a + first, a + last))
        before += b - a
    if len(spans) == 2 and spans[0][1] == spans[1][0]:  # the last rank of a zigzag holds the middle in one piece
        spans = [(spans[0][0], spans[1][1])]
    return tuple(spans)


def rank_spans(s: int, mesh: Mesh, rank: int | None = None) -> Spans:
    """Spans of this rank of `mesh.cp`, or of position `rank` on it; `s` is the length of the whole sequence."""
    inner, outer = mesh.cp_inner.size, mesh.cp_outer.size
    r = mesh.cp.rank if rank is None else rank
    return spans_of(s, (r // inner, outer), (r % inner, inner))


def positions(s: int, mesh: Mesh, device: torch.device | None = None) -> torch.Tensor:
    """Positions in the sequence of this rank's tokens, [s / cp] int64."""
    return torch.cat([torch.arange(a, b, device=device) for a, b in rank_spans(s, mesh)])


def local_tokens(x: torch.Tensor, mesh: Mesh, dim: int) -> torch.Tensor:
    """This rank's tokens of `x`, whose `dim` is the whole sequence."""
    if mesh.cp.size == 1:
        return x
    return torch.cat([x.narrow(dim, a, b - a) for a, b in rank_spans(x.shape[dim], mesh)], dim)


def gather_tokens(x: torch.Tensor, mesh: Mesh, dim: int) -> torch.Tensor:
    """The whole sequence, in order, from every cp rank's tokens; no gradient passes."""
    if mesh.cp.size == 1:
        return x
    parts = all_gather(x.detach().contiguous()[None], mesh.cp)
    s = x.shape[dim] * mesh.cp.size
    pieces = {}
    for rank in range(mesh.cp.size):
        at = 0
        for a, b in rank_spans(s, mesh, rank):
            pieces[a] = parts[rank].narrow(dim, at, b - a)
            at += b - a
    return torch.cat([pieces[a] for a in sorted(pieces)], dim)


def cut_batch(batch: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """This cp rank's part of a batch: the last dim of every tensor [.., s] but `NOT_CUT` is cut.

    Raises:
        ConfigError: the sequence cannot be cut so.
    """
    if mesh.cp.size == 1:
        return batch
    return {n: t if n in NOT_CUT else local_tokens(t, mesh, t.dim() - 1) for n, t in batch.items()}
