"""What NCCL would do with the messages of a pipeline: an executor's calls, played by the rules of ProcessGroupNCCL.

The executor of every rank runs for real, over a `PointToPoint` that writes down its calls (`programs`). The lists are
then played (`stuck`) by the rules that torch's process group gives to messages outside of a batch:

* a call returns at once; its kernel runs on the stream of its communicator, after what its rank has computed so far,
  and after all earlier messages on that communicator;
* a message passes when both its ends are the first on their streams (`buffered`: when NCCL's own buffers hold all of
  it, the sender's end passes alone);
* `wait` holds up what the rank computes, and nothing else.

| mode    | communicators                                                                                      |
|---------|----------------------------------------------------------------------------------------------------|
| `eager` | one for a group, so all messages of a rank to higher ranks, both ways, stand in one line           |
|         | (`init_process_group(device_id=...)`)                                                              |
| `lazy`  | one for each pair of ranks in a group: with a group for each direction, one for each directed edge |

"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline.execution import FunctionStage, TensorSpec
from minimegatron.parallel.pipeline.schedules import Schedule

Edge = tuple[int, int]  # positions of sender and receiver
Key = tuple[Edge, int]  # an edge, and the number of a message on it
ONE = torch.zeros(1)
KNOWN, HEADERS = TensorSpec(ONE.shape, ONE.dtype), TensorSpec()


class Call(NamedTuple):
    """One call of a rank: `what` is post, send, wait, delivered (of a send) or compute."""

    what: str
    edge: Edge = (-1, -1)
    number: int = -1
    action: int = -1  # how many actions of the list have been computed before this call

    @property
    def key(self) -> Key:
        return self.edge, self.number


class _P2P:
    """Stands for `PointToPoint`: writes down the calls, has every message at once."""

    def __init__(self, p: int, rank: int, program: list[Call]) -> None:
        self.pp, self.program = types.SimpleNamespace(size=p, rank=rank), program
        self.counts: dict[Edge, int] = defaultdict(int)
        self.pending: dict[int, list[Call]] = defaultdict(list)
        self.done = 0

    def say(self, what: str, edge: Edge = (-1, -1), number: int = -1) -> Call:
        call = Call(what, edge, number, self.done)
        self.program.append(call)
        return call

    def next(self, what: str, edge: Edge) -> Call:
        self.counts[edge] += 1
        return self.say(what, edge, self.counts[edge] - 1)

    def connect(self, edges: list[Edge]) -> None:
        """Before the first message: on NCCL making a communicator blocks the host until both ends have come."""

    def isend(self, x: torch.Tensor, to: int, what: str, header: bool = False) -> None:
        for _ in range(2 if header else 1):
            self.pending[to].append(self.next("send", (self.pp.rank, to)))

    def irecv(self, source: int, what: str, shape: Any = None, dtype: Any = None) -> _PendingRecv:
        return _PendingRecv(self, (source, self.pp.rank), shape is None)

    def release_sends(self, to: int, count: int) -> None:
        for call in self.pending[to][:count]:
            self.say("delivered", call.edge, call.number)
        self.pending[to] = self.pending[to][count:]

    def wait_sends(self) -> None:
        for to in sorted(self.pending):
            self.release_sends(to, len(self.pending[to]))


class _PendingRecv:
    """Stands for `p2p.PendingRecv`: a header, if there is one, is a message of its own, awaited before the tensor's."""

    def __init__(self, p2p: _P2P, edge: Edge, header: bool) -> None:
        self.p2p, self.payload_posted = p2p, not header
        self.posted = p2p.next("post", edge)

    def post_payload(self) -> None:
        if not self.payload_posted:
            self.p2p.say("wait", self.posted.edge, self.posted.number)
            self.posted = self.p2p.next("post", self.posted.edge)
            self.payload_posted = True

    def wait(self) -> torch.Tensor:
        self.post_payload()
        self.p2p.say("wait", self.posted.edge, self.posted.number)
        return ONE


def programs(
    schedule: Schedule, hidden: TensorSpec = KNOWN, run: Callable[..., None] = overlapped.run
) -> list[list[Call]]:
    """`[rank]` -> the calls of its executor, in order. Without a shape in `hidden`, activations have headers."""
    found = []
    for rank in range(schedule.p):
        program: list[Call] = []
        p2p = _P2P(schedule.p, rank, program)

        def compute(*_: Any, p2p: _P2P = p2p) -> torch.Tensor:
            p2p.say("compute")
            p2p.done += 1
            return ONE

        stage = FunctionStage(compute, compute, compute, hidden)
        run(schedule, [stage] * schedule.v, p2p, checked=True)
        found.append(program)
    return found


def stuck(programs: list[list[Call]], mode: str, *, buffered: bool = False) -> dict[int, Call]:
    """{rank: the call that it never gets past}; empty where everything ends.

    Args:
        mode: "eager" or "lazy".
        buffered: NCCL's buffers hold every message: a sender needs no receiver.
    """
    streams: dict[tuple, deque[tuple[Key, str]]] = defaultdict(deque)
    passed: set[tuple[Key, str]] = set()
    at = [0] * len(programs)

    def stream(rank: int, edge: Edge) -> tuple:
        up = edge[1] > edge[0]
        return (rank, up) if mode == "eager" else (rank, up, *sorted(edge))

    def go_on(rank: int) -> bool:
        """Let a rank compute until something holds it up; whether it moved."""
        begun = at[rank]
        for call in programs[rank][begun:]:
            line = streams[stream(rank, call.edge)] if call.what in ("post", "send") else None
            if call.what in ("wait", "delivered") and (call.key, "rs"[call.what == "delivered"]) not in passed:
                break
            if line is not None:
                line.append((call.key, call.what[0].replace("p", "r")))
            at[rank] += 1
        return at[rank] > begun

    def leave(rank: int, edge: Edge) -> None:
        passed.add(streams[stream(rank, edge)].popleft())

    def travel(edge: Edge) -> bool:
        """Let the next message of an edge pass; whether one did."""
        out, into = streams[stream(edge[0], edge)], streams[stream(edge[1], edge)]
        sends = bool(out) and out[0][0][0] == edge and out[0][1] == "s"
        takes = bool(into) and into[0][0][0] == edge and into[0][1] == "r"
        if buffered and sends:
            leave(edge[0], edge)
        elif buffered and takes and (into[0][0], "s") in passed:
            leave(edge[1], edge)
        elif sends and takes and not buffered:
            leave(edge[0], edge)
            leave(edge[1], edge)
        else:
            return False
        return True

    edges = sorted({call.edge for program in programs for call in program if call.what == "send"})
    while any([*[go_on(rank) for rank in range(len(programs))], *[travel(edge) for edge in edges]]):
        pass
    return {rank: program[i] for rank, program in enumerate(programs) if (i := at[rank]) < len(program)}


def ahead(program: list[Call]) -> list[tuple[Key, int, int]]:
    """(message, action before which its receive was posted, action that waits for it), in the order of the waits."""
    posted = {call.key: call.action for call in program if call.what == "post"}
    return [(call.key, posted[call.key], call.action) for call in program if call.what == "wait"]
