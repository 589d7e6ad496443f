"""A recurrence over a sequence that is cut over cp: what a rank's pieces need of those before them.

The problem in a sentence: token 1000 depends on token 1 through a state, and they are on different ranks.

A rank has one or two pieces of the sequence (`comm/sequence`). Of all that is before a piece, the piece needs the last
tokens, for the convolution, and one state. It makes `transition h + own` of the state h before it, where the transition
is a decay (`Scan.summary`) or a matrix (`DeltaRule.summary`). So no rank waits for the rank before it: each runs its
pieces as if the state before them were 0, all ranks gather what the pieces make of a state, and each carries a state of
zeros through all pieces before its own.

| sent in a layer                        | elements that a rank sends                |
|----------------------------------------|-------------------------------------------|
| last tokens, all-gather over cp        | 2 (k - 1) b (channels / t)                |
| states and decays, all-gather over cp  | 2 b (heads / t) (p n + 1), in fp32        |
| the same, with matrices                | 2 b (heads / t) (p n + p p), in fp32      |

The backward pass has a reduce-scatter of each, because ranks use what they gathered for different tokens. No message
grows with the sequence. Megatron-LM exchanges heads instead: `megatron/core/ssm/mamba_context_parallel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from minimegatron.comm.collectives import gather_from_region
from minimegatron.comm.sequence import rank_spans
from minimegatron.errors import DataError
from minimegatron.layers.ssm.scan import carry

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh


class Recurrence(Protocol):
    """A piece of a sequence under a recurrence whose state is a matrix."""

    def outputs(self, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tokens read, and the state after the piece, given that before it; None for zeros."""

    def summary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the piece adds to a state, and its transition; see `scan.carry`."""


class Pieces:
    """The pieces of a sequence that this rank has.

    Args:
        tokens: how many tokens are here.
        mesh: its cp shares the sequence.

    Attributes:
        spans: where the pieces lie in the sequence.
    """

    def __init__(self, tokens: int, mesh: Mesh) -> None:
        self.cp = mesh.cp
        of_ranks = [rank_spans(tokens * self.cp.size, mesh, rank) for rank in range(self.cp.size)]
        self.spans = of_ranks[self.cp.rank]
        self._shortest = min(b - a for spans in of_ranks for a, b in spans)
        starts = [(a, 2 * rank + i) for rank, spans in enumerate(of_ranks) for i, (a, _) in enumerate(spans)]
        self._order = [place for _, place in sorted(starts)]  # where `_before` gathers each piece

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The pieces of x, whose dim 0 are the tokens of this rank."""
        return x.split([b - a for a, b in self.spans])

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pieces in one tensor again."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def tails(self, parts: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        """For each piece [s', ...] the `count` tokens before it, [count, ...]; zeros before the sequence.

        Raises:
            DataError: a piece has fewer tokens.
        """
        if self.cp.size > 1 and self._shortest < count:
            raise DataError(
                f"a piece of {self._shortest} tokens: the convolution sees {count} tokens before each",
                fix=f"a seq_length of at least {2 * self.cp.size * count}, or a smaller context_parallel_size",
            )
        if self.cp.size == 1:
            return [parts[0].new_zeros(count, *parts[0].shape[1:])]
        return [of[-1] for of in self._before([part[-count:] for part in parts])]

    def states(self, scans: Sequence[Recurrence]) -> list[torch.Tensor | None]:
        """The state before each piece, [b, heads, p, n]; None for zeros."""
        if self.cp.size == 1:
            return [None]
        summaries = [scan.summary() for scan in scans]
        nothing, like = torch.zeros_like(summaries[0][0]), summaries[0][1]
        own = [torch.cat([of.reshape(*nothing.shape[:2], -1) for of in summary], 2) for summary in summaries]
        n = nothing.shape[2:].numel()
        return [
            carry(nothing, (x[..., :n].view_as(nothing) for x in of), (x[..., n:].view_as(like) for x in of))[1]
            for of in self._before(own)
        ]

    def _before(self, own: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each piece of this rank zeros, and the tensors of all pieces before it in the sequence, in order.

        The zeros depend on what was gathered, so that also a rank with no piece before its own takes part in the
        backward pass.

        Args:
            own: a tensor for each piece of this rank, all of one shape.
        """
        two = torch.stack([*own, *[torch.zeros_like(own[0])] * (2 - len(own))])
        every = gather_from_region(two, self.cp, 0, reduce_gradient=True)
        places = [self._order.index(2 * self.cp.rank + i) for i in range(len(own))]
        zeros = every[0].masked_fill(torch.ones_like(every[0], dtype=torch.bool), 0.0)
        return [[zeros, *(every[i] for i in self._order[:place])] for place in places]


class OverPieces(nn.Module):
    """A recurrence over a sequence of which this rank has pieces.

    Args:
        recurrence: `Scan` or `DeltaRule`.
        chunk_size: tokens of a chunk.
        mesh: its cp shares the sequence.
    """

    def __init__(self, recurrence: Callable[..., Recurrence], chunk_size: int, mesh: Mesh) -> None:
        super().__init__()
        self.recurrence, self.chunk_size, self.mesh = recurrence, chunk_size, mesh

    def forward(self, segments: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor:
        """What the tokens of this rank read, [s, b, heads, width].

        Args:
            segments: [b, 1 + s] of the whole sequence, see `Scan`; None for one document.
            inputs: of the recurrence, before its `chunk_size`; each [s, b, ...].
        """
        pieces = Pieces(len(inputs[0]), self.mesh)
        made = [
            self.recurrence(*of, self.chunk_size, None if segments is None else segments[:, start : stop + 1])
            for *of, (start, stop) in zip(*map(pieces.cut, inputs), pieces.spans, strict=True)
        ]
        return pieces.join([one.outputs(state)[0] for one, state in zip(made, pieces.states(made), strict=True)])
