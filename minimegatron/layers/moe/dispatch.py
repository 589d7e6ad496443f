"""Dispatchers: tokens to their experts, and what the experts say back to the tokens.

The problem in a sentence: rank r has T tokens and E/P of the experts; each of its tokens wants k experts, wherever they
are, and how many will come is known only after all ranks have routed.

On its rank every (expert, token) pair of the routing becomes a row, sorted by expert, then by token
(`layers/moe/permutation.py`).

**Two ways to travel**, over P ranks of ep, each of whose experts is cut over Q ranks of etp:

| dispatcher  | there                                           | back                                             |
|-------------|-------------------------------------------------|--------------------------------------------------|
| `allgather` | all tokens to all P Q ranks: T (h + E) elements, | sum of all partial results: reduce-scatter       |
|             | each picks what its experts get                 |                                                  |
| `alltoall`  | each row to its expert: counts first            | all-to-all with the splits exchanged, sum of the |
|             | (all-gather of E), all-to-all over ep of k T    | etp parts, rows added to their tokens            |
|             | rows (h + 1), then all-gather over etp          |                                                  |

The first is simple, needs no counts and pays (P Q - 1) T h whatever is wanted; the second pays k T h (P - 1)/P when the
load is even, so it wins as soon as k is smaller than P Q. Gradients take the same way back.

Rows from many ranks arrive sorted by sender; the experts want them sorted by expert. Within an expert they stand in
the order of the sending ranks of `etp_ep`, in both dispatchers, so an expert sees the same matrix either way, and its
weights' gradient is the same sum in the same order. What differs is the sum over a token's experts: all-to-all adds
k rows in the order of the experts, all-gather adds partial sums of ranks. With k = 2 and etp = 1 that is one addition
either way, and the two are equal bit for bit.

The all-gather over etp has parts of different lengths, which gloo refuses; it is an all-to-all in which every rank
sends the same rows to every other, and its gradient, summed over the receivers, is its reduce-scatter.

**What the host must know** are counts: how many rows it sends, gets, and hands to each expert. It waits for the device
once a layer and microbatch, for all of them together; not in the backward pass, and not when the layer is computed
again (`layers/recompute`).

A rank that is sent nothing gets 0 rows and still takes part in everything: its experts' gradients are zeros.

Lepikhin et al. 2020 (arXiv 2006.16668); Liu et al. 2025 (arXiv 2504.14960). Megatron-LM:
`megatron/core/transformer/moe/token_dispatcher.py`.
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
        counts = to_host(sizes, partial(self._expected, len(wanted)))
        rows, weights = order.rows(sum(counts))

        def back(y: torch.Tensor) -> torch.Tensor:
            return c.reduce_scatter_to_sequence_region(order.back(y), self.axis)

        sent = Dispatched(rows, weights, counts, back, sizes)
        return lambda: sent

    def _expected(self, tokens: int) -> list[int]:
        """Rows of each expert of this rank, of the `tokens` of all ranks together."""
        counts = planned_loads(tokens // self.axis.size, self.config, self.here)
        return [self.axis.size * n for n in counts[self.here]]


class AllToAllDispatcher:
    """See the module docstring.

    Args:
        config: how many experts.
        mesh: whose `ep` shares a layer's experts, and `etp` an expert.
    """

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        assert config.num_experts is not None
        self.config = config
        self.ep = mesh.ep
        self.etp = mesh.etp
        self.etp_ep = mesh.etp_ep
        self.local = config.num_experts // mesh.ep.size

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """tokens [T, h], their routing over all experts -> the rows of this rank's, once the result is called."""
        order = Permutation(tokens, routing, self.config)
        splits = self._splits(routing.map)
        rows = order.rows(sum(splits.inp))
        travelling = [c.all_to_all_region_start(x, self.ep, splits.out, splits.inp) for x in rows]

        def arrive() -> Dispatched:
            mine, weights = (_gather_uneven(end(), self.etp, splits.etp) for end in travelling)
            reorder = Reorder(splits.blocks, splits.by_expert, tokens.device)

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
        everyones = c.all_gather(here[None], self.etp_ep).view(p, q, p * local)  # etp varies fastest
        table, sizes = self._table(here, everyones)
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
        here = torch.tensor(planned_loads(tokens, self.config, slice(first, first + self.local)))
        return self._table(here, here.expand(self.ep.size, self.etp.size, -1))[0].tolist()  # type: ignore[no-any-return]

    def _table(self, here: torch.Tensor, everyones: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All numbers of `_Splits` that the host wants, and the rows of each expert here.

        Args:
            here: [E], rows of this rank for each expert.
            everyones: [p, q, E], those of each rank.
        """
        p, local, first = self.ep.size, self.local, self.ep.rank * self.local
        inp = here.view(p, local).sum(1)
        own = everyones[:, :, first : first + local]  # [p, q, local], what each rank sends to the experts here
        blocks, sizes = own.transpose(0, 1), own.sum((0, 1))  # rows arrive as [q, p, expert]
        return torch.cat([inp, own[:, self.etp.rank].sum(-1), own.sum((0, 2)), sizes, blocks.flatten()]), sizes


@dataclasses.dataclass
class Loads:
    """What a run that is planned takes for the loads of experts.

    Attributes:
        crowded: the experts of this rank get all rows that they can; else all experts get equally many.
        asked: whether it has mattered.
    """

    crowded: bool = False
    asked: bool = False


LOADS: ContextVar[Loads] = ContextVar("loads of experts in a run that is planned")


def planned_loads(tokens: int, config: TransformerConfig, here: slice) -> list[int]:
    """Rows that a rank sends to each of the E experts, where tensors have no numbers (`LOADS`).

    Args:
        tokens: of the rank.
        config: how many experts a token has, and an expert's capacity.
        here: the experts that get all that they can, where loads are crowded.
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
            all_tokens, row = tokens * ep * etp, config.hidden_size * element_size
            found["all_gather/etp_ep"] = all_tokens * (row + config.num_experts * (weight + 1))
            found["reduce_scatter/etp_ep"] = all_tokens * row
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
