"""Token dispatchers: send each token to its experts, and add up what the experts return.

The problem in a sentence: rank r has T tokens and E/P of the experts; each token goes to k experts on any ranks, and
how many tokens an expert gets is known only after all ranks have routed.

On one rank tokens are permuted into rows, sorted by expert (`layers/moe/permutation`). Between ranks there are two
ways, over P ranks of ep, each of whose experts is cut over Q ranks of etp:

| dispatcher  | to the experts                                   | back                                             |
|-------------|--------------------------------------------------|--------------------------------------------------|
| `allgather` | all tokens to all P Q ranks: T (h + E) elements, | sum of all partial results: reduce-scatter       |
|             | each rank picks the rows of its experts          |                                                  |
| `alltoall`  | counts (all-gather of E), then all-to-all over   | all-to-all with the splits exchanged, sum of the |
|             | ep of k T rows (h + 1), then all-gather over etp | etp parts, rows added to their tokens            |

The first pays (P Q - 1) T h whatever is routed; the second k T h (P - 1)/P when the load is even, so it wins as soon as
k is smaller than P Q. Gradients take the same way back.

Rows arrive sorted by sender and are sorted by expert (`permutation.Reorder`), those of an expert by the sending rank of
`etp_ep`. So in both dispatchers an expert sees the same matrix, and the gradient of its weight is the same sum in the
same order. The sum over a token's experts is not: all-to-all adds k rows in the order of the experts, all-gather adds
partial sums of ranks. With k = 2 and etp = 1 both are one addition, and equal bit for bit.

The all-gather over etp has parts of different lengths, which gloo refuses; it is an all-to-all in which every rank
sends the same rows to all others, and its gradient, summed over the receivers, is the reduce-scatter.

**The host must know counts**: rows to send, to receive, and of each expert. It waits for the device once a layer and
microbatch, for all of them; neither in the backward pass nor under recompute (`layers/recompute`). A rank that receives
no rows takes part in every call all the same, and its experts' gradients are zeros.

Lepikhin et al. 2020 (arXiv 2006.16668); Liu et al. 2025 (arXiv 2504.14960). Megatron-LM: `token_dispatcher.py` in
`megatron/core/transformer/moe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.config.model import TransformerConfig
from minimegatron.layers.moe.permutation import Permutation, Reorder
from minimegatron.layers.moe.router import Routing, capacity
from minimegatron.layers.recompute import to_host

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows for this rank's experts, and how to send results back.

    Attributes:
        rows: [n, h], sorted by expert.
        probs: [n], the weight of each row.
        counts: rows of each expert of this rank.
        back: results [n, h] of the rows -> [T, h], summed for every token of this rank.
        sizes: `counts` on the device, [E'] int64, if the dispatcher has them there.
    """

    rows: torch.Tensor
    probs: torch.Tensor
    counts: list[int]
    back: Callable[[torch.Tensor], torch.Tensor]
    sizes: torch.Tensor | None = None

    def ends(self) -> torch.Tensor:
        """Index after the last row of each expert, [E'] int32 on the device."""
        sizes = self.rows.new_tensor(self.counts, dtype=torch.int64) if self.sizes is None else self.sizes
        return sizes.cumsum(0, dtype=torch.int32)


class Dispatcher(Protocol):
    """Sends tokens to experts. `dispatch` begins; calling its result ends, so that work can be done in between."""

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]: ...


# ------------------------------------------------------------------------------------------------ the two ways


class AllGatherDispatcher:
    """Sends all tokens to all ranks of `etp_ep`; see the module docstring.

    Args:
        config: how many experts.
        mesh: its `etp_ep` shares a layer's experts.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        assert config.num_experts is not None
        self.config, self.axis = config, mesh.etp_ep
        self.here = slice(*experts_here(config.num_experts, mesh.ep))

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """tokens [T, h] and their routing over all experts -> the rows for this rank's experts."""
        tokens = c.gather_from_sequence_region(tokens, self.axis)
        probs = c.gather_from_sequence_region(routing.probs, self.axis)[:, self.here]
        wanted = c.all_gather(routing.map.to(torch.uint8), self.axis)[:, self.here].bool()
        order = Permutation(tokens, Routing(probs, wanted), self.config)
        sizes = wanted.sum(0)
        counts = to_host(sizes, partial(self._expected, len(wanted)))
        rows, weights = order.rows(sum(counts))

        def back(y: torch.Tensor) -> torch.Tensor:
            return c.reduce_scatter_to_sequence_region(order.back(y), self.axis)

        sent = Dispatched(rows, weights, counts, back, sizes)
        return lambda: sent

    def _expected(self, tokens: int) -> list[int]:
        """Rows of each expert of this rank, for the `tokens` of all ranks together."""
        counts = planned_loads(tokens // self.axis.size, self.config, self.here)
        return [self.axis.size * n for n in counts[self.here]]


class AllToAllDispatcher:
    """Sends each token to the ranks of its experts; see the module docstring.

    Args:
        config: how many experts.
        mesh: its `ep` shares a layer's experts, its `etp` each expert.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        assert config.num_experts is not None
        self.config = config
        self.ep = mesh.ep
        self.etp = mesh.etp
        self.etp_ep = mesh.etp_ep
        self.local = config.num_experts // mesh.ep.size

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """tokens [T, h] and their routing over all experts -> a function that gives the rows for this rank's
        experts."""
        order = Permutation(tokens, routing, self.config)
        splits = self._splits(routing.map)
        rows = order.rows(sum(splits.inp))
        travelling = [c.all_to_all_region_start(x, self.ep, splits.out, splits.inp) for x in rows]

        def arrive() -> Dispatched:
            arrived, weights = (_gather_uneven(end(), self.etp, splits.etp) for end in travelling)
            reorder = Reorder(splits.blocks, splits.by_expert, tokens.device)

            def back(y: torch.Tensor) -> torch.Tensor:
                y = _reduce_scatter_uneven(reorder.back(y), self.etp, splits.etp)
                y = c.all_to_all_region(y, self.ep, splits.inp, splits.out)
                return order.back(y)

            return Dispatched(reorder.there(arrived), reorder.there(weights), splits.counts, back, splits.sizes)

        return arrive

    def _splits(self, wanted: torch.Tensor) -> _Splits:
        """Row counts of the messages, from the counts of all ranks; waits for the device, once."""
        p, q, local = self.ep.size, self.etp.size, self.local
        counts = wanted.sum(0)  # [E]
        all_counts = c.all_gather(counts[None], self.etp_ep).view(p, q, p * local)  # etp varies fastest
        table, sizes = self._table(counts, all_counts)
        lists = to_host(table, partial(self._expected, len(wanted)))
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

    def _expected(self, tokens: int) -> list[int]:
        first = self.ep.rank * self.local
        counts = torch.tensor(planned_loads(tokens, self.config, slice(first, first + self.local)))
        return self._table(counts, counts.expand(self.ep.size, self.etp.size, -1))[0].tolist()  # type: ignore[no-any-return]

    def _table(self, counts: torch.Tensor, all_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All numbers of `_Splits` that the host needs, and the rows of each expert of this rank.

        Args:
            counts: [E], rows of this rank for each expert.
            all_counts: [p, q, E], those of each rank.
        """
        p, local, first = self.ep.size, self.local, self.ep.rank * self.local
        inp = counts.view(p, local).sum(1)
        own = all_counts[:, :, first : first + local]  # [p, q, local], what each rank sends to the experts here
        blocks, sizes = own.transpose(0, 1), own.sum((0, 1))  # rows arrive as [q, p, expert]
        return torch.cat([inp, own[:, self.etp.rank].sum(-1), own.sum((0, 2)), sizes, blocks.flatten()]), sizes


@dataclasses.dataclass
class Loads:
    """The loads of experts that a plan assumes.

    Attributes:
        crowded: the experts of this rank get all rows that they can; else all experts get equally many.
        asked: whether a layer has used the assumption.
    """

    crowded: bool = False
    asked: bool = False


LOADS: ContextVar[Loads] = ContextVar("loads of experts in a run that is planned")


def planned_loads(tokens: int, config: TransformerConfig, here: slice) -> list[int]:
    """Rows that a rank sends to each of the E experts, where tensors have no values (`LOADS`).

    Args:
        tokens: tokens of the rank.
        config: how many experts a token has, and an expert's capacity.
        here: the experts that get all that they can, if loads are crowded.
    """
    assert config.num_experts is not None
    loads, count, k = LOADS.get(Loads()), config.num_experts, config.moe_router_topk
    most = tokens if config.moe_expert_capacity_factor is None else capacity(tokens, config)
    if config.moe_expert_capacity_factor is not None and config.moe_pad_expert_input_to_capacity:
        return [most] * count
    loads.asked = True
    wanted, total = dict[int, int](), k * tokens
    if loads.crowded:
        local = here.stop - here.start
        wanted = dict(zip(range(here.start, here.stop), _evenly(min(k, local) * tokens, local), strict=True))
        total -= min(k, local) * tokens
    others = [e for e in range(count) if e not in wanted]
    wanted |= dict(zip(others, _evenly(total, len(others)), strict=True))
    return [min(most, wanted[e]) for e in range(count)]


def _evenly(total: int, parts: int) -> list[int]:
    return [(i + 1) * total // parts - i * total // parts for i in range(parts)]


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
    """[lengths[r], ...] of each rank r -> all of them; the gradient is summed over the ranks."""
    if axis.size == 1:
        return x
    copies = x.repeat(axis.size, *[1] * (x.dim() - 1))
    return c.all_to_all_region(copies, axis, lengths, [len(x)] * axis.size)


def _reduce_scatter_uneven(y: torch.Tensor, axis: Axis, lengths: list[int]) -> torch.Tensor:
    """[sum(lengths), ...] on each rank -> this rank's [lengths[r], ...] of the sum."""
    if axis.size == 1:
        return y
    length = lengths[axis.rank]
    return c.all_to_all_region(y, axis, [length] * axis.size, lengths).unflatten(0, (axis.size, length)).sum(0)


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
        config: h, E, k, the dispatcher and the router's dtype, which is that of the weights of experts.
        tokens: T of one rank.
        ep, etp: P and Q.
        element_size: bytes of an element of an activation.

    Returns:
        {"collective/axis": bytes} as `trace.Log` counts them; the backward pass sends as much, without counts and maps.
    """
    assert config.num_experts is not None
    weight = 8 if config.moe_router_dtype == "fp64" else 4
    nbytes: dict[str, int] = {}
    if config.moe_token_dispatcher_type == "allgather":
        if ep * etp > 1:
            all_tokens, row = tokens * ep * etp, config.hidden_size * element_size
            nbytes["all_gather/etp_ep"] = all_tokens * (row + config.num_experts * (weight + 1))
            nbytes["reduce_scatter/etp_ep"] = all_tokens * row
        return nbytes
    there_and_back = 2 * config.hidden_size * element_size + weight
    rows = tokens * config.moe_router_topk
    if ep * etp > 1:
        nbytes["all_gather/etp_ep"] = config.num_experts * 8 * ep * etp
    if ep > 1:
        nbytes["all_to_all/ep"] = rows * there_and_back
    if etp > 1:
        nbytes["all_to_all/etp"] = etp * rows * there_and_back
    return nbytes
