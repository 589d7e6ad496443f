"""What a program did, not only what it returned: messages, bytes, order, and the largest tensor it ever made.

An all-reduce of one's own and torch's give the same numbers; a "ZeRO" that keeps every optimizer state does too. So
each rank of a check runs under a dispatch mode, which sees every operation of torch on its way to the kernel,
hand-written communication included: `send` is `c10d::send` however it was called. Beside it stand the events of
`minimegatron.trace`, which know the mesh axis.

    evidence.count("send"), evidence.nbytes("send")       # counted on this rank
    evidence.calls[0].at < evidence.ops                    # sent before the last operation: overlap
    evidence.largest                                       # bytes; an attention that builds S x S shows here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron import trace

# The names of c10d's operators, as users of torch.distributed know them.
_NAMES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "send": "send", "recv_": "recv",
    "recv_any_source_": "recv", "broadcast_": "broadcast", "reduce_": "reduce", "barrier": "barrier",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "gather_": "gather", "scatter_": "scatter",
    "monitored_barrier_": "barrier",
}  # fmt: skip
_MAX_CALLS = 50_000


@dataclasses.dataclass(frozen=True)
class Call:
    """One communication of one rank.

    Attributes:
        name: `all_reduce`, `send`, ... as in torch.distributed.
        nbytes: the larger of what goes in and what comes out, as `trace` counts.
        peer: the other rank of a send or receive, within the group; -1 otherwise.
        at: how many operations of torch came before it on this rank.
    """

    name: str
    nbytes: int
    peer: int
    at: int


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one rank did while the learner's function ran.

    Attributes:
        calls: its communications, in order.
        events: what `minimegatron.trace` recorded, in order.
        ops: number of operations of torch.
        largest: bytes of the largest tensor that any operation returned.
    """

    calls: tuple[Call, ...] = ()
    events: tuple[trace.Event, ...] = ()
    ops: int = 0
    largest: int = 0

    def count(self, *names: str) -> int:
        """Number of communications with one of these names; of all, if none is given."""
        return sum(not names or call.name in names for call in self.calls)

    def nbytes(self, *names: str) -> int:
        """Bytes of those communications."""
        return sum(call.nbytes for call in self.calls if not names or call.name in names)

    def to_plain(self) -> dict[str, Any]:
        return {
            "calls": [dataclasses.astuple(call) for call in self.calls],
            "events": [dataclasses.astuple(event) for event in self.events],
            "ops": self.ops,
            "largest": self.largest,
        }

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Evidence:
        calls = tuple(Call(*call) for call in data["calls"])
        return cls(calls, tuple(trace.Event(*event) for event in data["events"]), data["ops"], data["largest"])


class Witness(TorchDispatchMode):
    """Context manager that collects the evidence of one rank::

    with Witness(rank) as witness:
        learner(x)
    witness.evidence()
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.ops = self.largest = 0
        self._recorder = trace.record(rank)
        self._log = trace.Log(rank)

    def __enter__(self) -> Witness:
        self._log = self._recorder.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recorder.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and len(self.calls) < _MAX_CALLS:
            nbytes = max((_nbytes(arg) for arg in args), default=0)
            peer = args[2] if name in ("send", "recv_") else -1
            self.calls.append(Call(_NAMES.get(name, name), nbytes, peer, self.ops))
        result = func(*args, **(kwargs or {}))
        if namespace != "c10d":
            self.ops += 1
            self.largest = max(self.largest, *(t.nbytes for t in _tensors(result)), 0)
        return result

    def evidence(self) -> Evidence:
        return Evidence(tuple(self.calls), tuple(self._log.events), self.ops, self.largest)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))
