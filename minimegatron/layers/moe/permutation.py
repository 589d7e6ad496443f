"""Rows for experts, on one rank: the tokens of a routing sorted by expert, and back.

**Tokens into rows** (`Permutation`). Every (expert, token) pair of the routing becomes a row, sorted by expert, then by
token, so the rows of an expert are contiguous. On the way back row i is added to its token. Both directions are an
index, and each is the other's gradient.

    map [T, E]   1 0 1        row of each pair   0 . 2
                 0 0 0                           . . .
                 0 0 1                           . . 3
                 1 0 0                           1 . .

A cumulative sum gives the row of each of the T E possible pairs; writing each wanted pair at its row inverts that. The
number of rows is not needed, so a GPU builds the index before the host has read it.

**Rows from several senders** (`Reorder`) arrive sorted by sender, then by expert. Blocks of rows change places, and
back.

No rank is needed here: `layers/moe/dispatch` sends the rows. Megatron-LM: `permute` and `sort_chunks_by_idxs` of
`moe_utils.py`, in `megatron/core/transformer/moe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.config.model import TransformerConfig
from minimegatron.kernels import ops
from minimegatron.layers.moe.router import Routing


def pairs_of(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The (token, expert) pair of each row, computed without knowing the number of rows.

    Args:
        wanted: [T, E'] map of some experts.

    Returns:
        pairs [T E'], t E' + e of every row, sorted by expert and then by token, garbage after the last row; and
        [E', T], the row of every pair, garbage where the pair is not wanted.
    """
    tokens, experts = wanted.shape
    by_expert = wanted.t().flatten()
    row = by_expert.cumsum(0) - 1
    numbers = torch.arange(tokens * experts, device=wanted.device).view(tokens, experts).t().flatten()
    pairs = torch.empty(tokens * experts + 1, dtype=torch.int64, device=wanted.device)
    pairs.scatter_(0, row.where(by_expert, tokens * experts), numbers)  # what is not wanted is written behind the end
    return pairs[:-1], row.view(experts, tokens)


class Permutation:
    """Permutes the tokens of one batch into rows, and back.

    Args:
        tokens: [T, h].
        routing: their routing over some experts.
        config: how many experts a token has, and `kernels`.
    """

    def __init__(self, tokens: torch.Tensor, routing: Routing, config: TransformerConfig) -> None:
        self._probs = routing.probs
        self._pairs, row = pairs_of(routing.map)
        experts, pads = routing.map.shape[1], config.moe_pad_expert_input_to_capacity
        # padding puts a token into experts that it has not chosen, with weight 0: into all of them at most
        most = experts if pads else min(config.moe_router_topk, experts)
        self._order = ops.permutation(tokens, routing.map, row, most, kernels=config.kernels)

    def rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The n rows [n, h], sorted by expert and then by token, and the weight of each."""
        pairs = self._pairs[:n]
        weights = self._probs.flatten().index_select(0, pairs)
        return self._order.permute(pairs), weights

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, h] -> [T, h]: each row is added to its token."""
        return self._order.unpermute(rows)


def regroup(sizes: Sequence[int], order: Sequence[int], device: torch.device) -> torch.Tensor:
    """The index that puts blocks of `sizes` rows into another `order`: `x[regroup(...)]`."""
    blocks = torch.arange(sum(sizes), device=device).split(list(sizes))
    return torch.cat([blocks[i] for i in order]) if blocks else torch.arange(0, device=device)


class Reorder:
    """Sorts rows that arrive sorted by sender by expert, and back.

    Args:
        sizes: rows of each block (sender, expert), in the order of arrival.
        by_expert: the blocks in the order of the experts.
        device: device of the rows.
    """

    def __init__(self, sizes: Sequence[int], by_expert: Sequence[int], device: torch.device) -> None:
        self._there: torch.Tensor | None = None
        if list(by_expert) != sorted(by_expert):  # one sender or one expert: they are in order
            self._there = regroup(sizes, by_expert, device)
            self._back = torch.empty_like(self._there)
            self._back[self._there] = torch.arange(len(self._there), device=device)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] by sender -> by expert."""
        return x if self._there is None else _Reordered.apply(x, self._there, self._back)  # type: ignore[no-any-return]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] by expert -> by sender."""
        return x if self._there is None else _Reordered.apply(x, self._back, self._there)  # type: ignore[no-any-return]


class _Reordered(torch.autograd.Function):
    """x[there]. The gradient of an index sums entries that occur twice; none does here, so the inverse index gives
    it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None
