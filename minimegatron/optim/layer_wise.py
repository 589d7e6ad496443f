"""Whole parameters shared out over replicas: each has one owner, who updates it and sends it to the others.

The problem in a sentence: ZeRO cuts a buffer into equal ranges, and Muon needs whole matrices.

Every replica has every gradient (a plain all-reduce). Sorted by size, parameters are dealt out to the D replicas there
and back again, so that each gets about as much: of nine parameters, from the smallest

    replica 0    a           f   g
    replica 1        b   e           h
    replica 2        c   d               i

An owner keeps main parameters and moments of what it owns and takes the step; then it sends the new weights. Experts
are dealt out over their own replicas (edp).

| what travels, besides the gradients | axis              | bytes                              |
|-------------------------------------|-------------------|------------------------------------|
| a broadcast from each owner         | `dp_cp` and `edp` | all weights in the model's dtype   |

Megatron-LM: `--optimizer dist_muon`, `megatron/core/optimizer/layer_wise_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import broadcast
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of

NamedParams = Sequence[tuple[str, nn.Parameter]]


class LayerWise:
    """The owners of a model's parameters.

    Args:
        params: (name, parameter), all that are trained.
        mesh: the layout.

    Attributes:
        owned: names of those that this rank updates.
    """

    def __init__(self, params: NamedParams, mesh: Mesh) -> None:
        experts = [(n, p) for n, p in params if layout_of(p).experts is not None]
        dense = [(n, p) for n, p in params if layout_of(p).experts is None]
        self._hands = [(axis, deal(some, axis.size)) for some, axis in ((dense, mesh.dp_cp), (experts, mesh.edp))]
        self.owned = {name for axis, hands in self._hands for name, _ in hands[axis.rank]}

    @torch.no_grad()
    def publish(self) -> None:
        """Each owner's weights are new: send them to the other replicas."""
        for axis, owner, some in self.messages():
            _send(some, axis, owner)

    def messages(self) -> Iterator[tuple[Axis, int, list[nn.Parameter]]]:
        """(Replicas, owner, weights) of each message."""
        for axis, hands in self._hands:
            for owner, hand in enumerate(hands):
                for dtype in dict.fromkeys(p.dtype for _, p in hand):
                    yield axis, owner, [p for _, p in hand if p.dtype == dtype]


def deal(params: NamedParams, ranks: int) -> list[list[tuple[str, nn.Parameter]]]:
    """What each of so many ranks owns; the same on all of them."""
    hands: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(ranks)]
    turns = [*range(ranks), *reversed(range(ranks))]
    for number, (name, param) in enumerate(sorted(params, key=lambda item: item[1].numel())):
        hands[turns[number % len(turns)]].append((name, param))
    return hands


def _send(params: list[nn.Parameter], axis: Axis, owner: int) -> None:
    flat = torch.cat([p.detach().flatten() for p in params])
    broadcast(flat, axis, owner)
    for param, values in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.copy_(values.view_as(param))
