"""Dispatchers: tokens to their experts, and what the experts say back to the tokens.

The problem in a sentence: rank r has T tokens and E/P of the experts; each of its tokens wants k experts, wherever they
are, and how many will come is known only after everybody has routed.

**Permutation.** Every (expert, token) pair of the routing becomes a row, sorted by expert, then by token: what goes to
one expert is contiguous. Back again, row i is added to its token. Both are an index; each is the other's gradient.

**Two ways to travel**, over P ranks of ep, each of whose experts is cut over Q ranks of etp:

| dispatcher  | there                                           | back                                             |
|-------------|-------------------------------------------------|--------------------------------------------------|
| `allgather` | all tokens to all P Q ranks: T (h + E) elements, | sum of all partial results: reduce-scatter       |
|             | each picks what its experts get                 |                                                  |
| `alltoall`  | each row to its expert: counts first            | all-to-all with the splits exchanged, sum of the |
|             | (all-gather of E), all-to-all over ep of k T    | etp parts, rows added to their tokens            |
|             | rows (h + 1), then all-gather over etp          |                                                  |

The first is simple, needs no counts and pays (P Q - 1) T h whoever wants what; the second pays k T h (P - 1)/P when the
load is even, so it wins as soon as k is smaller than P Q. Gradients take the same way back.

Rows from many ranks arrive sorted by sender; the experts want them sorted by expert. Within an expert they stand in
the order of the sending ranks of `etp_ep`, in both dispatchers, so an expert sees the same matrix either way, and its
weights' gradient is the same sum in the same order. What differs is the sum over a token's experts: all-to-all adds
k rows in the order of the experts, all-gather adds partial sums of ranks. With k = 2 and etp = 1 that is one addition
either way, and the two are equal bit for bit.

The all-gather over etp has parts of different lengths, which gloo refuses; it is an all-to-all in which everybody
sends the same rows to everybody, and its gradient, summed over the receivers, is the reduce-scatter that belongs to it.

**What the host must know** are counts: how many rows it sends, gets, and hands to each expert. It waits for the device
once a layer and microbatch, for all of them together; not in the backward pass, and not when the layer is computed
again (`layers/recompute`). The index of a permutation does not need them: it has T E places, one for each pair that
could be, and the rows are the first of these.

A rank to which nobody sends gets 0 rows and still takes part in everything: its experts' gradients are zeros.

Lepikhin et al. 2020 (arXiv 2006.16668); Liu et al. 2025 (arXiv 2504.14960). Megatron-LM:
`megatron/core/transformer/moe/token_dispatcher.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import TransformerConfig
from minimegatron.kernels.switch import kernels
from minimegatron.layers.recompute import to_host
from minimegatron.layers.router import Routing


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What this rank's experts are to work on, and how to send it back.

    Attributes:
        rows: [n, h], sorted by expert.
        probs: [n], the weight of each row.
        counts: rows of each expert of this rank.
        back: [n, h], what the experts made of the rows -> [T, h], summed for every token of this rank.
        sizes: `counts` on the device, [E'] int64, where the dispatcher has them there.
    """

    rows: torch.Tensor
    probs: torch.Tensor
    counts: list[int]
    back: Callable[[torch.Tensor], torch.Tensor]
    sizes: torch.Tensor | None = None

    def ends(self) -> torch.Tensor:
        """Behind the last row of each expert, [E'] int32 on the device."""
        sizes = self.rows.new_tensor(self.counts, dtype=torch.int64) if self.sizes is None else self.sizes
        return sizes.cumsum(0, dtype=torch.int32)


class Dispatcher(Protocol):
    """Sends tokens to experts. `dispatch` begins; calling its result ends, so that work can be done in between."""

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]: ...


# -------------------------------------------------------------------------------------------- the permutation


def pairs_of(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which (token, expert) pair each row is, without knowing how many rows there are.

    Args:
        wanted: [T, E'] map of some experts.

    Returns:
        pairs [T E'], t E' + e of every row, sorted by expert and then by token, garbage behind the last row; and
        [E', T], the row of every pair, garbage where it is not wanted.
    """
    tokens, experts = wanted.shape
    by_expert = wanted.t().flatten()
    row = by_expert.cumsum(0) - 1
    numbers = torch.arange(tokens * experts, device=wanted.device).view(tokens, experts).t().flatten()
    pairs = torch.empty(tokens * experts + 1, dtype=torch.int64, device=wanted.device)
    pairs.scatter_(0, row.where(by_expert, tokens * experts), numbers)  # what nobody wants is written behind the end
    return pairs[:-1], row.view(experts, tokens)


def places_of(wanted: torch.Tensor, row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same permutation as `kernels/permute.py` wants it.

    Args:
        wanted: [T, E'] map of some experts.
        row: of every pair, see `pairs_of`.
        k: at most so many are wanted by a token.

    Returns:
        slot [T, E'] of every pair, token times k plus which of its choices, garbage where it is not wanted; places
        [T, k], the row of every choice or -1.
    """
    tokens = len(wanted)
    slot = wanted.cumsum(1) + torch.arange(-1, tokens * k - 1, k, device=wanted.device)[:, None]
    places = torch.full((tokens * k + 1,), -1, dtype=torch.int64, device=wanted.device)
    places.scatter_(0, slot.where(wanted, tokens * k).flatten(), row.t().flatten())
    return slot, places[:-1].view(tokens, k)


class Permutation:
    """`permute` and `unpermute` of one batch of tokens, by kernels where `config.kernels` has some.

    Args:
        tokens: [T, h].
        routing: of these tokens, over some experts.
        config: how many experts a token has, and what computes.
    """

    def __init__(self, tokens: torch.Tensor, routing: Routing, config: TransformerConfig) -> None:
        self._tokens, self._probs = tokens, routing.probs
        self._ops = kernels(config.kernels, "permute", tokens)
        self._pairs, row = pairs_of(routing.map)
        if self._ops is not None:
            experts, pads = routing.map.shape[1], config.moe_pad_expert_input_to_capacity
            # padding puts a token into experts that it has not chosen, with weight 0: into all of them at most
            most = experts if pads else min(config.moe_router_topk, experts)
            self._slot, self._places = places_of(routing.map, row, most)

    def rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The n rows and their weights, see `permute`."""
        pairs = self._pairs[:n]
        weights = self._probs.flatten().index_select(0, pairs)
        if self._ops is None:
            self._source = pairs // self._probs.shape[1]
            return self._tokens[self._source], weights
        self._slots = self._slot.flatten().index_select(0, pairs)
        return self._ops.permute(self._tokens, self._slots, self._places), weights

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, h] -> [T, h]: each row added to its token."""
        if self._ops is None:
            return unpermute(rows, self._source, len(self._tokens))
        return self._ops.unpermute(rows, self._slots, self._places)  # type: ignore[no-any-return]


def unpermute(rows: torch.Tensor, source: torch.Tensor, tokens: int) -> torch.Tensor:
    """rows [n, h] -> [tokens, h]: each row added to its token, in the order of the rows."""
    return rows.new_zeros((tokens, rows.shape[1])).index_add(0, source, rows)


def regroup(sizes: Sequence[int], order: Sequence[int], device: torch.device) -> torch.Tensor:
    """The index that puts blocks of `sizes` rows into another `order`: `x[regroup(...)]`."""
    blocks = torch.arange(sum(sizes), device=device).split(list(sizes))
    return torch.cat([blocks[i] for i in order]) if blocks else torch.arange(0, device=device)


class Reorder:
    """Rows that arrive sorted by sender, sorted by expert, and back.

    Args:
        splits: of one batch.
        device: of the rows.
    """

    def __init__(self, splits: _Splits, device: torch.device) -> None:
        self._there: torch.Tensor | None = None
        if splits.by_expert != sorted(splits.by_expert):  # one sender or one expert: they are in order
            self._there = regroup(splits.blocks, splits.by_expert, device)
            self._back = torch.empty_like(self._there)
            self._back[self._there] = torch.arange(len(self._there), device=device)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] by sender -> by expert."""
        return x if self._there is None else _Reordered.apply(x, self._there, self._back)  # type: ignore[no-any-return]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] by expert -> by sender."""
        return x if self._there is None else _Reordered.apply(x, self._back, self._there)  # type: ignore[no-any-return]


class _Reordered(torch.autograd.Function):
    """x[there]. The gradient of an index adds up what might be there twice; here it is the inverse index."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


# ------------------------------------------------------------------------------------------------ the two ways


class AllGatherDispatcher:
    """See the module docstring.

    Args:
        config: how many experts.
        mesh: whose `etp_ep` shares a layer's experts.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        assert config.num_experts is not None
        self.config, self.axis = config, mesh.etp_ep
        self.here = slice(*experts_here(config.num_experts, mesh.ep))

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """tokens [T, h], their routing over all experts -> the rows of this rank's."""
        tokens = c.gather_from_sequence_region(tokens, self.axis)
        probs = c.gather_from_sequence_region(routing.probs, self.axis)[:, self.here]
        wanted = c.all_gather(routing.map.to(torch.uint8), self.axis)[:, self.here].bool()
        order = Permutation(tokens, Routing(probs, wanted), self.config)
        sizes = wanted.sum(0)
        counts = to_host(sizes)
        rows, weights = order.rows(sum(counts))

        def back(y: torch.Tensor) -> torch.Tensor:
            return c.reduce_scatter_to_sequence_region(order.back(y), self.axis)

        sent = Dispatched(rows, weights, counts, back, sizes)
        return lambda: sent


class AllToAllDispatcher:
    """See the module docstring.

    Args:
        config: how many experts.
        mesh: whose `ep` shares a layer's experts, and `etp` an expert.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        assert config.num_experts is not None
        self.config = config
        self.ep, self.etp, self.etp_ep = mesh.ep, mesh.etp, mesh.etp_ep
        self.local = config.num_experts // mesh.ep.size

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """tokens [T, h], their routing over all experts -> the rows of this rank's, once the result is called."""
        order = Permutation(tokens, routing, self.config)
        splits = self._splits(routing.map)
        rows = order.rows(sum(splits.inp))
        travelling = [c.all_to_all_region_start(x, self.ep, splits.out, splits.inp) for x in rows]

        def arrive() -> Dispatched:
            mine, weights = (_gather_uneven(end(), self.etp, splits.etp) for end in travelling)
            reorder = Reorder(splits, tokens.device)

            def back(y: torch.Tensor) -> torch.Tensor:
                y = _reduce_scatter_uneven(reorder.back(y), self.etp, splits.etp)
                y = c.all_to_all_region(y, self.ep, splits.inp, splits.out)
                return order.back(y)

            return Dispatched(reorder.there(mine), reorder.there(weights), splits.counts, back, splits.sizes)

        return arrive

    def _splits(self, wanted: torch.Tensor) -> _Splits:
        """What goes where, from the counts of all ranks; waits for the device, once."""
        p, q, local = self.ep.size, self.etp.size, self.local
        here = wanted.sum(0)  # [E]
        everybody = c.all_gather(here[None], self.etp_ep).view(p, q, p * local)  # etp varies fastest
        first = self.ep.rank * local
        inp = here.view(p, local).sum(1)
        own = everybody[:, :, first : first + local]  # [p, q, local], what each rank sends to the experts here
        blocks, sizes = own.transpose(0, 1), own.sum((0, 1))  # rows arrive as [q, p, expert]
        lists = to_host(torch.cat([inp, own[:, self.etp.rank].sum(-1), own.sum((0, 2)), sizes, blocks.flatten()]))
        ends = [p, 2 * p, 2 * p + q, 2 * p + q + local]
        order = [(j * p + i) * local + e for e in range(local) for i in range(p) for j in range(q)]
        return _Splits(
            lists[: ends[0]],
            lists[ends[0] : ends[1]],
            lists[ends[1] : ends[2]],
            lists[ends[2] : ends[3]],
            lists[ends[3] :],
            order,
            sizes,
        )


@dataclasses.dataclass(frozen=True)
class _Splits:
    """Row counts: sent to and received from each ep rank, held by each etp rank, of each expert here, of each block
    (sender, expert) in the order of arrival; the blocks in the order of the experts; and the rows of each expert here,
    on the device."""

    inp: list[int]
    out: list[int]
    etp: list[int]
    counts: list[int]
    blocks: list[int]
    by_expert: list[int]
    sizes: torch.Tensor


def _gather_uneven(x: torch.Tensor, axis: Axis, lengths: list[int]) -> torch.Tensor:
    """[lengths[r], ...] of each rank -> all of them; the gradient is summed over the ranks."""
    if axis.size == 1:
        return x
    copies = x.repeat(axis.size, *[1] * (x.dim() - 1))
    return c.all_to_all_region(copies, axis, lengths, [len(x)] * axis.size)


def _reduce_scatter_uneven(y: torch.Tensor, axis: Axis, lengths: list[int]) -> torch.Tensor:
    """[sum(lengths), ...] on each rank -> this rank's [lengths[r], ...] of the sum."""
    if axis.size == 1:
        return y
    mine = lengths[axis.rank]
    return c.all_to_all_region(y, axis, [mine] * axis.size, lengths).unflatten(0, (axis.size, mine)).sum(0)


def experts_here(num_experts: int, ep: Axis) -> tuple[int, int]:
    """The experts [first, stop) of this rank: consecutive ones, as many on each."""
    local = num_experts // ep.size
    return ep.rank * local, (ep.rank + 1) * local


DISPATCHERS: dict[str, type[AllGatherDispatcher] | type[AllToAllDispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}


def dispatch_bytes(config: TransformerConfig, tokens: int, ep: int, etp: int, element_size: int = 4) -> dict[str, int]:
    """Payload bytes of one layer's forward pass on a rank, when every expert gets as many tokens from every rank.

    Args:
        config: h, E, k, the dispatcher and the router's dtype (in which weights of experts travel).
        tokens: T of one rank.
        ep, etp: P and Q.
        element_size: bytes of an element of an activation.

    Returns:
        {"collective/axis": bytes} as `trace.Log` counts them; the backward pass moves as much, but for counts and maps.
    """
    assert config.num_experts is not None
    weight = 8 if config.moe_router_dtype == "fp64" else 4
    found: dict[str, int] = {}
    if config.moe_token_dispatcher_type == "allgather":
        if ep * etp > 1:
            everybody, row = tokens * ep * etp, config.hidden_size * element_size
            found["all_gather/etp_ep"] = everybody * (row + config.num_experts * (weight + 1))
            found["reduce_scatter/etp_ep"] = everybody * row
        return found
    there_and_back = 2 * config.hidden_size * element_size + weight
    rows = tokens * config.moe_router_topk
    if ep * etp > 1:
        found["all_gather/etp_ep"] = config.num_experts * 8 * ep * etp
    if ep > 1:
        found["all_to_all/ep"] = rows * there_and_back
    if etp > 1:
        found["all_to_all/etp"] = etp * rows * there_and_back
    return found
