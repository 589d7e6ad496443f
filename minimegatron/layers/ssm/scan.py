"""The recurrence of Mamba-2 chunk by chunk (state-space duality, SSD).

The problem in a sentence: a recurrence costs one small step after the other, for every token, and a GPU wants few large
products.

Each head has a state h [p, n], which fades and takes in the token x_t [p]; B_t and C_t [n] say where it is written and
where it is read:

    h_t = exp(g_t) h_{t-1} + dt_t x_t B_t^T          y_t = h_t C_t             g_t = dt_t A

A < 0 is a number of the head, dt_t > 0 one of the token and head; a group of heads shares B and C. Written out, y is
attention without a softmax, where the weight of token j for token i is C_i . B_j times what is left after i - j steps:

    y_i = sum_{j <= i} exp(a_i - a_j) (C_i . B_j) dt_j x_j             a_i = g_1 + ... + g_i

Both forms are used. The sequence is cut into chunks of l tokens; inside a chunk the second form is three products, and
from chunk to chunk states are carried, by one more product for each `BLOCK` chunks:

| of a chunk | formula                                               | shape                |
|------------|-------------------------------------------------------|----------------------|
| within     | (C B^T * decays) X                                    | [l, p] a head        |
| state      | sum_j exp(a_l - a_j) dt_j x_j B_j^T                   | [p, n] a head        |
| decay      | exp(a_l)                                              | a number a head      |
| read       | exp(a_i) (h C_i), h the state before the chunk        | [l, p] a head        |

Work: s (2 l (n / r + p) + 4 p n) FLOPs a head, with r heads a group; attention has s in place of l. Memory for the
backward pass: above all the decays and weights within chunks, 8 s l bytes a head; `--recompute-activations` computes
them again, and on a GPU the kernel of `ops.chunk_scan` makes them where it uses them, in both passes. A chunk that is
not full is padded with dt = 0, which neither fades the state nor adds to it. With documents nothing passes their
borders: each of the four formulas loses the terms that would.

Everything is computed in fp32 (fp64 for fp64): decays multiply up over the whole sequence.

Dao and Gu 2024 (arXiv 2405.21060), section 6. mamba-ssm: `mamba_chunk_scan_combined`; Megatron-LM calls that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minimegatron.kernels import ops

BLOCK = 32  # chunks whose states are carried by one product


class Scan:
    """The chunks of a piece of a sequence; what came before the piece is added by `outputs`.

    Args:
        x: [s, b, heads, p].
        dt: [s, b, heads], fp32, not negative.
        g: [s, b, heads], fp32, logarithms of decays: dt A, not positive.
        B, C: [s, b, groups, n]; heads of a group are consecutive.
        chunk_size: l.
        segments: [b, 1 + s], numbers of the documents of the tokens and of the token before them; None for one
            document.
        kernels: `config.kernels`.
    """

    def __init__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        g: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        segments: torch.Tensor | None = None,
        kernels: str = "auto",
    ) -> None:
        s, groups, wide = len(x), B.shape[2], torch.promote_types(x.dtype, torch.float32)
        length = min(chunk_size, s)
        self.length = s

        def chunks(t: torch.Tensor) -> torch.Tensor:
            """[s, b, ...] -> [chunks, b, l, ...]."""
            if s % length:
                t = F.pad(t, (0, 0) * (t.dim() - 1) + (0, -s % length))
            return t.unflatten(0, (-1, length)).transpose(1, 2)

        x = chunks(x.to(wide) * dt[..., None]).unflatten(3, (groups, -1))  # [c, b, l, g, r, p]
        B, self._C = chunks(B.to(wide)), chunks(C.to(wide))  # [c, b, l, g, n]
        a = chunks(g).cumsum(2).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)  # [c, b, g, r, l]
        _, to_end, from_start, self._documents, of = in_one_document(segments, s, length, x.device)
        scores = torch.einsum("cblgn,cbmgn->cbglm", self._C, B)
        within = ops.chunk_scan(
            scores.flatten(0, 1),
            a.flatten(2, 3).flatten(0, 1),
            x.flatten(3, 4).flatten(0, 1),
            None if of is None else of.flatten(0, 1),
            kernels=kernels,
        )
        self._within = within.view(x.shape)
        kept = masked_exp(a[..., -1:] - a, to_end).permute(0, 1, 4, 2, 3)[..., None] * x
        self._states = torch.einsum("cblgrp,cblgn->cbgrpn", kept, B).flatten(2, 3)
        self._logs = a[..., -1].flatten(2, 3)
        self._reads = masked_exp(a, from_start).permute(0, 1, 4, 2, 3)[..., None]

    def outputs(self, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """y [s, b, heads, p] and the state after the piece, given that before it; both [b, heads, p, n].

        Args:
            state: default zeros.
        """
        before, after = self._carry(state)
        h = before.unflatten(2, (self._C.shape[3], -1))
        y = self._within + torch.einsum("cblgn,cbgrpn->cblgrp", self._C, h) * self._reads
        return y.transpose(1, 2).flatten(0, 1)[: self.length].flatten(2, 3), after

    def summary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the piece makes of a state: adds [b, heads, p, n], after a decay [b, heads] of it."""
        whole = None if self._documents is None else (self._documents[0] == self._documents[-1])[:, None]
        return self._carry(None)[1], masked_exp(self._logs.sum(0), whole)

    def _carry(self, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The states before the chunks [chunks, b, heads, p, n], and that after them, `BLOCK` chunks at once."""
        state, found = self._states.new_zeros(self._states.shape[1:]) if state is None else state, []
        for i in range(0, len(self._states), BLOCK):
            given = torch.cat([state[None], self._states[i : i + BLOCK]])
            h = torch.einsum("kjbh,jbhpn->kbhpn", self._passed(i, i + BLOCK), given)
            state = h[-1]
            found.append(h[:-1])
        return found[0] if len(found) == 1 else torch.cat(found), state

    def _passed(self, first: int, stop: int) -> torch.Tensor:
        """What is left of each state after each chunk, [k, j, b, heads]: of the one before the chunks (j = 0) and of
        their own, after none of them (k = 0) and after each."""
        logs = F.pad(self._logs[first:stop], (0, 0) * 2 + (1, 0))
        place = torch.arange(len(logs), device=logs.device)
        later = (place[:, None] > place)[..., None, None]
        keep = (place[:, None] >= place)[..., None, None]
        if self._documents is not None:
            of = self._documents[first : stop + 1]
            keep = keep & (of[:, None] == of)[..., None]
        return masked_exp(logs[:, None].masked_fill(~later, 0.0).cumsum(0), keep)


def step(
    x: torch.Tensor, dt: torch.Tensor, g: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence for one token, as `Scan` of a piece of one: dims as there without the first; y and the state."""
    B, C = (t.to(state.dtype).repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    faded = g.exp()[..., None, None] * state
    state = torch.addcmul(faded, (dt[..., None] * x)[..., None], B[:, :, None])
    return (state @ C[..., None]).squeeze(-1), state


def carry(
    state: torch.Tensor, states: Iterable[torch.Tensor], transitions: Iterable[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The states before each of several parts of a sequence, and the state after them.

    Args:
        state: [b, heads, p, n], before the first part.
        states: what each part adds, see `Scan.summary`.
        transitions: what each part makes of a state before: times a number [b, heads], or a matrix [b, heads, p, p].
    """
    before = []
    for own, of in zip(states, transitions, strict=True):
        before.append(state)
        state = (of @ state if of.dim() == state.dim() else of[..., None, None] * state) + own
    return before, state


class InOneDocument(NamedTuple):
    """Which tokens of c chunks of l are in one document; None where all are.

    Attributes:
        pairs: [l, l] or [c, b, 1, 1, l, l], tokens with those before them, in their chunk.
        to_end, from_start: [c, b, 1, 1, l], tokens with the last one of their chunk, and with the one before it.
        ends: [1 + c, b], the documents of the token before the piece, and of each chunk's last.
        of: [c, b, l], the documents of the tokens.
    """

    pairs: torch.Tensor
    to_end: torch.Tensor | None = None
    from_start: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    of: torch.Tensor | None = None


def in_one_document(segments: torch.Tensor | None, s: int, length: int, device: torch.device) -> InOneDocument:
    """Of s tokens in chunks of `length`; segments [b, 1 + s] as `Scan` has them."""
    place = torch.arange(length, device=device)
    pairs = place[:, None] >= place
    if segments is None:
        return InOneDocument(pairs)
    of = torch.cat([segments[:, 1:], segments[:, -1:].expand(-1, -s % length)], 1)
    of = of.unflatten(1, (-1, length)).transpose(0, 1)  # [c, b, l]
    ends = torch.cat([segments[None, :, 0], of[:, :, -1]])
    pairs = pairs & (of[..., None] == of[:, :, None])[:, :, None, None]
    to_end, from_start = ((of == end[..., None])[:, :, None, None] for end in (ends[1:], ends[:-1]))
    return InOneDocument(pairs, to_end, from_start, ends, of)


def masked_exp(log: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """exp(log), and 0 where `keep` is False; there log may be large."""
    return (log if keep is None else log.masked_fill(~keep, -torch.inf)).exp()
