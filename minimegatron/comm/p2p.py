"""Messages between two ranks of a pipeline: sends that never block, receives in order, a deadline for every wait.

    isend(x, to)        start the transfer, keep x until it has left, and go on
    irecv(source)       post a receive; `.wait()` on what it returns blocks until the tensor is here
    wait_sends()        at the end of a batch: wait for the sends that are still under way

If rank 1 sends an activation to rank 2, rank 2 sends a gradient to rank 1, and each waits until the other has received,
both wait for ever; so a sender never waits. A receiver posts its receives in the order in which the sender sends, and
may post one early: then the next input travels while this one is being computed. An order of *work* that would wait for
itself is found before anything runs (`parallel/pipeline/schedule_check`).

**No two messages can cross.** NCCL matches messages between a pair of ranks by order alone, and gloo those with equal
tags. With two ranks and an interleaved schedule, activations *and* gradients go both ways between the same two ranks,
and a receive posted for one could get the other: same shape, no error, wrong numbers. Two process groups, one for
messages to higher ranks and one for those to lower ranks, leave one sender and one receiver on every edge, and one
order: that in which the sender produces.

    rank 0 --- pp_up ---> rank 1 --- pp_up ---> rank 2          and from 0 to 2, when the ring closes, as well
    rank 0 <-- pp_down -- rank 1 <-- pp_down -- rank 2

**On NCCL each directed edge is a communicator of its own**, with one stream, on which messages wait for those before
them. torch makes one for each *pair* of ranks that talk in a group, hence one for each edge here, provided that groups
are made without `device_id`. With it all messages of a rank in a group share one, senders wait, and an interleaved
model deadlocks in evaluation, or in training with large groups of microbatches. `tests/parallel/pipeline/nccl_order.py`
plays the executors by these rules, and no schedule of the package deadlocks. Three things still would: a stage that
synchronises its *device* (`torch.cuda.synchronize()`) and so waits for the receive that was posted early, whose sender
waits for this rank; whatever frees memory of the device (`torch.cuda.empty_cache()`, or torch itself when memory is
short); and `CUDA_DEVICE_MAX_CONNECTIONS=1`, which puts the edges into one queue (`launch/hardware`).

| part                    | bytes                          | when                                        |
|-------------------------|--------------------------------|---------------------------------------------|
| the tensor              | its elements                   | `isend`                                     |
| the header              | 8 * `HEADER` before it         | only where the receiver cannot know a shape |

Megatron-LM: `megatron/core/pipeline_parallel/p2p_communication.py`, which fuses a send with a receive to the same end.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from minimegatron import trace
from minimegatron.comm import watchdog
from minimegatron.comm.async_ops import Work, blocking, issue
from minimegatron.comm.axis import Axis
from minimegatron.errors import ConfigError

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh

HEADER = 8  # numbers of a header: dims, dtype, up to six sizes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


class PendingRecv:
    """A posted receive. `wait()` returns the tensor.

    Args:
        source: position of the sender on the axis.
        what: for the record and the message of a deadline.
        shape, dtype: of the tensor; None where a header says it.
    """

    def __init__(
        self, p2p: PointToPoint, source: int, what: str, shape: torch.Size | None, dtype: torch.dtype | None
    ) -> None:
        self._p2p = p2p
        self._source = source
        self.what = what
        self._posted = time.monotonic()
        self._header: Work | None = None
        if shape is None:
            self._header = self._post(torch.empty(HEADER, dtype=torch.int64, device=p2p.device))
        else:
            self._payload = self._post(torch.empty(shape, dtype=dtype, device=p2p.device), header=False)

    @property
    def payload_posted(self) -> bool:
        """Whether the tensor itself is posted; before that nothing else may be posted from the same sender."""
        return self._header is None

    def post_payload(self) -> None:
        """Wait for the header, if there is one, and post the tensor."""
        if self._header is not None:
            dims, dtype, *sizes = self._header.wait().tolist()
            self._header = None
            x = torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=self._p2p.device)
            self._payload = self._post(x, header=False)

    def wait(self) -> torch.Tensor:
        """Block until the tensor is here (on a GPU: until the current stream may use it).

        Raises:
            RuntimeError: the sender has gone, or did not send within the deadline.
        """
        self.post_payload()
        return self._payload.wait()  # type: ignore[no-any-return]

    def _post(self, x: torch.Tensor, header: bool = True) -> Work:
        p2p, source = self._p2p, self._source
        axis = p2p.edge(source, p2p.pp.rank)
        sender = axis.ranks[source]
        event = {"name": "recv", "axis": "pp", "nbytes": x.nbytes, "size": 2, "note": self.what}
        work = Work(
            x, f"receive {self.what} from rank {sender}", _pair(axis, sender),
            event=None if header else event, note=self.what, timeout=p2p.deadline,
            message=(sender, axis.ranks[axis.rank]),
        )  # fmt: skip
        issue(work, lambda transport: transport.recv(x, axis, source))
        work.start = self._posted  # of the header, where there is one
        return work


class PointToPoint:
    """This rank's messages to and from the other ranks of its pipeline.

    Args:
        mesh: whose `pp_up` and `pp_down` groups carry the messages.

    Attributes:
        pp: the ranks of the pipeline; senders and receivers are positions on it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.pp = mesh.pp
        self._up = mesh.pp_up
        self._down = mesh.pp_down
        self.device = mesh.device
        self._nccl = self._up.group is not None and dist.get_backend(self._up.group) == "nccl"
        limit = datetime.timedelta(seconds=mesh.parallel.distributed_timeout_seconds)
        # `wait` with a deadline blocks the host on NCCL until the message is here, in naps of a millisecond; without
        # one it holds up the stream alone, and the deadline is kept by `comm.watchdog`.
        waits_raise = self._up.group is None or watchdog.waits_raise(dist.get_backend(self._up.group))
        self.deadline: tuple[datetime.timedelta, ...] = (limit,) if waits_raise else ()
        self._pending: dict[int, list[list[Work]]] = {}  # of each message its header, if it has one, and its tensor
        self._connected: set[tuple[int, int]] = set()

    def edge(self, source: int, destination: int) -> Axis:
        """The group that carries messages from one position of the pipeline to another."""
        return self._up if destination > source else self._down

    def connect(self, edges: list[tuple[int, int]]) -> None:
        """Open these connections; every rank of the pipeline passes the same edges, in the same order.

        NCCL makes a connection at its first message, and *that* waits for the other end: in an order of its own it can
        close a circle of ranks that wait. So it is done once, edge by edge. gloo connects when a group is made.
        """
        if not self._nccl:
            return
        for source, destination in edges:
            if (source, destination) not in self._connected and self.pp.rank in (source, destination):
                axis, x = self.edge(source, destination), torch.zeros(1, device=self.device)
                other = axis.ranks[destination if self.pp.rank == source else source]
                call = dist.isend if self.pp.rank == source else dist.irecv
                pair = _pair(axis, other)
                with blocking(f"connect ranks {pair.ranks[0]} and {pair.ranks[1]}", pair):
                    work = call(x, other, group=axis.group)
                    assert work is not None, "both ends are members of the group"
                    work.wait()
                    torch.cuda.current_stream().synchronize()
            self._connected.add((source, destination))

    def isend(self, x: torch.Tensor, to: int, what: str, header: bool = False) -> None:
        """Start sending `x` to position `to`, and go on.

        Args:
            x: must not be changed before `wait_sends`.
            to: position of the receiver.
            what: for the record.
            header: say shape and dtype first.

        Raises:
            ConfigError: a tensor that a header cannot describe.
        """
        axis, x = self.edge(self.pp.rank, to), x.detach().contiguous()
        parts = [_header(x).to(self.device), x] if header else [x]
        self._pending.setdefault(to, []).append([self._send(part, to, axis, what) for part in parts])
        now = time.monotonic()
        trace.emit("send", "comm", now, now, axis="pp", nbytes=x.numel() * x.element_size(), size=2, note=what)

    def _send(self, x: torch.Tensor, to: int, axis: Axis, what: str) -> Work:
        receiver = axis.ranks[to]
        work = Work(
            x, f"deliver {what} to rank {receiver}", _pair(axis, receiver), timeout=self.deadline,
            message=(axis.ranks[axis.rank], receiver),
        )  # fmt: skip
        return issue(work, lambda transport: transport.send(x, axis, to))

    def irecv(
        self, source: int, what: str, shape: torch.Size | None = None, dtype: torch.dtype | None = None
    ) -> PendingRecv:
        """Post a receive of the next message from position `source`; without a shape its header is awaited first."""
        return PendingRecv(self, source, what, shape, dtype)

    def release_sends(self, to: int, count: int) -> None:
        """Release the first `count` pending messages to `to`, which the caller knows to have arrived.

        gloo does not say when a send has ended, but a message from a rank proves that it has had all it needed for it.
        """
        for message in self._pending.get(to, [])[:count]:
            for work in message:
                work.wait()
        self._pending[to] = self._pending.get(to, [])[count:]

    def pending_sends(self) -> int:
        """Messages that are kept because they may still be under way."""
        return sum(map(len, self._pending.values()))

    def wait_sends(self) -> None:
        """Wait until everything that was sent has left.

        Raises:
            RuntimeError: a receiver has gone, or did not receive its messages within the deadline.
        """
        for to in sorted(self._pending):
            self.release_sends(to, len(self._pending[to]))


def _pair(axis: Axis, other: int) -> Axis:
    """This rank and another one, by global rank."""
    this = axis.ranks[axis.rank]
    ranks = tuple(sorted((other, this)))
    return Axis("pp", ranks, ranks.index(this))


def _header(x: torch.Tensor) -> torch.Tensor:
    """[dims, dtype, sizes..., 0...] in int64.

    Raises:
        ConfigError: more dims, or another dtype, than a header has room for.
    """
    if x.dim() > HEADER - 2 or x.dtype not in _DTYPES:
        raise ConfigError(
            f"a stage returned a tensor of {x.dim()} dims in {x.dtype}, which no header describes",
            fix=f"at most {HEADER - 2} dims, of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}",
        )
    numbers = [x.dim(), _DTYPES.index(x.dtype), *x.shape]
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)
