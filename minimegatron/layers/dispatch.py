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

A rank to which nobody sends gets 0 rows and still takes part in everything: its experts' gradients are zeros.

Lepikhin et al. 2020 (arXiv 2006.16668); Liu et al. 2025 (arXiv 2504.14960). Megatron-LM:
`megatron/core/transformer/moe/token_dispatcher.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import TransformerConfig
from minimegatron.kernels.switch import kernels
from minimegatron.layers.router import Routing


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What this rank's experts are to work on, and how to send it back.

    Attributes:
        rows: [n, h], sorted by expert.
        probs: [n], the weight of each row.
        counts: rows of each expert of this rank.
        back: [n, h], what the experts made of the rows -> [T, h], summed for every token of this rank.
    """

    rows: torch.Tensor
    probs: torch.Tensor
    counts: list[int]
    back: Callable[[torch.Tensor], torch.Tensor]


class Dispatcher(Protocol):
    """Sends tokens to experts. `dispatch` begins; calling its result ends, so that work can be done in between."""

    def dispatch(self, tokens: torch.Tensor, routing: Routing) -> Callable[[], Dispatched]: ...


# -------------------------------------------------------------------------------------------- the permutation


def permute(tokens: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every pair (expert, token) as a row.

    Args:
        tokens: [T, h].
        routing: of these tokens, over some experts [T, E'].

    Returns:
        Rows [n, h] sorted by expert and then by token; their weights [n]; the token of each row [n].
    """
    _, source = routing.map.t().nonzero(as_tuple=True)
    return tokens[source], routing.probs.t()[routing.map.t()], source


def places_of(wanted: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same permutation as `kernels/permute.py` wants it.

    Args:
        wanted: [T, E'] map of some experts.
        k: at most so many are wanted by a token.

    Returns:
        slots [n], token times k plus which of its choices, for every row; places [T, k], the row of every choice or -1.
    """
    choice = wanted.cumsum(1) - 1
    row = wanted.t().flatten().cumsum(0).view(wanted.shape[1], -1).t() - 1
    places = row.new_full((len(wanted), k + 1), -1)
    places.scatter_(1, choice.where(wanted, k), row.where(wanted, -1))  # what nobody wants is written behind the end
    slots = (torch.arange(len(wanted), device=wanted.device)[:, None] * k + choice).t()[wanted.t()]
    return slots, places[:, :k].contiguous()


class Permutation:
    """`permute` and `unpermute` of one batch of tokens, by kernels where `config.kernels` has some.

    Args:
        tokens: [T, h].
        routing: of these tokens, over some experts.
        config: how many experts a token has, and what computes.

    Attributes:
        rows, weights: see `permute`.
    """

    def __init__(self, tokens: torch.Tensor, routing: Routing, config: TransformerConfig) -> None:
        self._tokens, self._ops = len(tokens), kernels(config.kernels, "permute", tokens)
        if self._ops is None:
            self.rows, self.weights, self._source = permute(tokens, routing)
            return
        experts, pads = routing.map.shape[1], config.moe_pad_expert_input_to_capacity
        # padding puts a token into experts that it has not chosen, with weight 0: into all of them at most
        most = experts if pads else min(config.moe_router_topk, experts)
        self._slots, self._places = places_of(routing.map, most)
        self.rows = self._ops.permute(tokens, self._slots, self._places)
        self.weights = routing.probs.t()[routing.map.t()]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, h] -> [T, h]: each row added to its token."""
        if self._ops is None:
            return unpermute(rows, self._source, self._tokens)
        return self._ops.unpermute(rows, self._slots, self._places)  # type: ignore[no-any-return]


def unpermute(rows: torch.Tensor, source: torch.Tensor, tokens: int) -> torch.Tensor:
    """rows [n, h] -> [tokens, h]: each row added to its token, in the order of the rows."""
    return rows.new_zeros((tokens, rows.shape[1])).index_add(0, source, rows)


def regroup(sizes: Sequence[int], order: Sequence[int], device: torch.device) -> torch.Tensor:
    """The index that puts blocks of `sizes` rows into another `order`: `x[regroup(...)]`."""
    blocks = torch.arange(sum(sizes), device=device).split(list(sizes))
    return torch.cat([blocks[i] for i in order]) if blocks else torch.arange(0, device=device)


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

        def back(y: torch.Tensor) -> torch.Tensor:
            return c.reduce_scatter_to_sequence_region(order.back(y), self.axis)

        sent = Dispatched(order.rows, order.weights, wanted.sum(0).tolist(), back)
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
        travelling = [
            c.all_to_all_region_start(x, self.ep, splits.out, splits.inp) for x in (order.rows, order.weights)
        ]

        def arrive() -> Dispatched:
            mine, weights = (_gather_uneven(end(), self.etp, splits.etp) for end in travelling)
            to_experts = regroup(splits.blocks, splits.by_expert, tokens.device)
            from_experts = torch.empty_like(to_experts)
            from_experts[to_experts] = torch.arange(len(to_experts), device=tokens.device)

            def back(y: torch.Tensor) -> torch.Tensor:
                y = _reduce_scatter_uneven(y[from_experts], self.etp, splits.etp)
                y = c.all_to_all_region(y, self.ep, splits.inp, splits.out)
                return order.back(y)

            return Dispatched(mine[to_experts], weights[to_experts], splits.counts, back)

        return arrive

    def _splits(self, wanted: torch.Tensor) -> _Splits:
        """What goes where, from the counts of all ranks; waits for the device, once."""
        p, q, local = self.ep.size, self.etp.size, self.local
        here = wanted.sum(0)  # [E]
        everybody = c.all_gather(here[None], self.etp_ep).view(p, q, p * local)  # etp varies fastest
        first = self.ep.rank * local
        inp = here.view(p, local).sum(1)
        own = everybody[:, :, first : first + local]  # [p, q, local], what each rank sends to the experts here
        blocks = own.transpose(0, 1)  # rows arrive as [q, p, expert]
        lists = torch.cat(
            [inp, own[:, self.etp.rank].sum(-1), own.sum((0, 2)), own.sum((0, 1)), blocks.flatten()]
        ).tolist()
        ends = [p, 2 * p, 2 * p + q, 2 * p + q + local]
        order = [(j * p + i) * local + e for e in range(local) for i in range(p) for j in range(q)]
        return _Splits(
            lists[: ends[0]],
            lists[ends[0] : ends[1]],
            lists[ends[1] : ends[2]],
            lists[ends[2] : ends[3]],
            lists[ends[3] :],
            order,
        )


@dataclasses.dataclass(frozen=True)
class _Splits:
    """Row counts: sent to and received from each ep rank, held by each etp rank, of each expert here, of each block
    (sender, expert) in the order of arrival; and the blocks in the order of the experts."""

    inp: list[int]
    out: list[int]
    etp: list[int]
    counts: list[int]
    blocks: list[int]
    by_expert: list[int]


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
