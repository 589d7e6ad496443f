"""Messages: in order, never crossed, of any shape, waited for with a deadline that names who is missing."""

from __future__ import annotations

import datetime
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minimegatron import trace
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.errors import RankError


def p2p_of(world: int, seconds: float = 30.0) -> PointToPoint:
    parallel = ParallelConfig(pipeline_model_parallel_size=world, distributed_timeout_seconds=seconds)
    return PointToPoint(Mesh.build(parallel))


def exchange(rank: int, world: int, count: int) -> list[list[float]]:
    """Both ranks send `count` messages before either receives one."""
    p2p, other = p2p_of(world), 1 - rank
    for i in range(count):
        p2p.isend(torch.full((1000,), 100.0 * rank + i), other, f"message {i}")
    received = [p2p.irecv(other, f"message {i}", torch.Size([1000]), torch.float32) for i in range(count)]
    values = [r.wait() for r in reversed(received)]  # waited for in any order
    p2p.wait_sends()
    assert p2p.pending_sends() == 0
    return [[v.min().item(), v.max().item()] for v in reversed(values)]


def each_way(rank: int, world: int) -> tuple[bool, list[float]]:
    """Which group carries what; and a column of a matrix, whose numbers do not lie side by side."""
    p2p, other = p2p_of(world), 1 - rank
    apart = p2p.edge(0, 1).group is not p2p.edge(1, 0).group
    p2p.isend(torch.arange(6.0).view(3, 2)[:, 1] + 10 * rank, other, "a column")
    p2p.isend(torch.arange(6.0).view(3, 2)[:, rank], other, "a column as it is")
    received = [p2p.irecv(other, "a column", torch.Size([3]), torch.float32).wait() for _ in range(2)]
    p2p.wait_sends()
    return apart, torch.cat(received).tolist()


def test_each_direction_has_its_group_and_tensors_may_have_holes(ranks):
    assert ranks(2).run(each_way) == [
        (True, [11.0, 13.0, 15.0, 1.0, 3.0, 5.0]),
        (True, [1.0, 3.0, 5.0, 0.0, 2.0, 4.0]),
    ]


def test_messages_keep_their_order_and_their_direction(ranks):
    first, second = ranks(2).run(exchange, 20)
    assert first == [[100.0 + i] * 2 for i in range(20)]
    assert second == [[float(i)] * 2 for i in range(20)]


@pytest.mark.parametrize(("backend", "limits"), [("nccl", []), ("gloo", [datetime.timedelta(seconds=30)])])
def test_only_gloo_waits_with_a_timeout(monkeypatch, backend, limits):
    """On NCCL `wait(timeout)` would block the host until the message is here; the deadline is `comm.watchdog`'s."""
    waited = []

    class Work:
        def wait(self, *timeout):
            waited.append([*timeout])

    for name, result in (("get_backend", backend), ("irecv", Work()), ("isend", Work())):
        monkeypatch.setattr(dist, name, lambda *_, result=result, **__: result)
    parallel = ParallelConfig(pipeline_model_parallel_size=2, distributed_timeout_seconds=30)
    edge = Axis("pp_up", (0, 1), 1, group=object())
    mesh = SimpleNamespace(pp=edge, pp_up=edge, pp_down=edge, device=torch.device("cpu"), parallel=parallel)
    p2p = PointToPoint(mesh)
    p2p.irecv(0, "x", torch.Size([1]), torch.float32).wait()
    p2p.isend(torch.ones(1), 0, "y")
    p2p.wait_sends()
    assert waited == [limits, limits]


def ring(rank: int, world: int) -> list[float]:
    """Every rank sends to the right, the last to the first, several times, each before receiving."""
    p2p = p2p_of(world)
    edges = [(r, (r + 1) % world) for r in range(world)]
    p2p.connect(edges)
    x = torch.tensor([float(rank)])
    for _ in range(world):
        p2p.isend(x, (rank + 1) % world, "x")
        x = p2p.irecv((rank - 1) % world, "x", x.shape, x.dtype).wait()
    p2p.wait_sends()
    return x.tolist()


def test_a_ring_that_closes(ranks):
    assert ranks(4).run(ring) == [[0.0], [1.0], [2.0], [3.0]]


SHAPES = [((3, 2, 5), torch.float32), ((), torch.int64), ((0, 4), torch.bfloat16), ((1, 2, 3, 4, 5, 6), torch.float64)]


def unannounced(rank: int, world: int) -> tuple[list[str], trace.Log]:
    p2p = p2p_of(world)
    with trace.record(rank) as log:
        for shape, dtype in SHAPES:
            if rank == 0:
                p2p.isend(torch.ones(shape).to(dtype), 1, "y", header=True)
        found = [p2p.irecv(0, "y").wait() for _ in SHAPES] if rank == 1 else []
        p2p.wait_sends()
    return [f"{tuple(x.shape)} {x.dtype} {x.sum().item():g}" for x in found], log


def test_headers_say_shape_and_dtype(ranks):
    (_, sent), (found, received) = ranks(2).run(unannounced)
    totals = [torch.ones(shape).sum().item() for shape, _ in SHAPES]
    want = [f"{shape} {dtype} {total:g}" for (shape, dtype), total in zip(SHAPES, totals, strict=True)]
    assert found == want
    nbytes = sum(torch.ones(shape).to(dtype).nbytes for shape, dtype in SHAPES)
    assert sent.nbytes("send", axis="pp") == received.nbytes("recv", axis="pp") == nbytes
    assert sum(e.wire_bytes for e in sent.events + received.events) == nbytes


def undescribed(rank: int, world: int) -> None:
    p2p_of(world).isend(torch.zeros([1] * 7), 1 - rank, "y", header=True)


def test_a_tensor_that_no_header_describes_is_refused(ranks):
    with pytest.raises(RankError, match="7 dims"):
        ranks(2).run(undescribed)


def starve(rank: int, world: int) -> str:
    p2p = p2p_of(world, seconds=0.5)
    if rank == 0:
        time.sleep(1.8)
        return ""
    begun = time.monotonic()
    try:
        p2p.irecv(0, "F3 for stage 1", torch.Size([4]), torch.float32).wait()
    except RuntimeError as error:
        return f"{time.monotonic() - begun:.1f} {error} {error.__notes__}"
    return "no error"


def test_a_message_that_does_not_come_has_a_deadline(ranks):
    _, said = ranks(2).run(starve)
    assert 0.4 < float(said.split()[0]) < 1.7
    assert "rank 1 waited: receive F3 for stage 1 from rank 0 over pp (ranks 0-1)" in said


def silent(rank: int, world: int) -> None:
    p2p = p2p_of(world)
    if rank == 1:
        p2p.irecv(0, "F0 for stage 1", torch.Size([4]), torch.float32).wait()
    time.sleep(30)


def test_a_job_whose_message_does_not_come_says_who_kept_whom_waiting(ranks):
    with pytest.raises(Exception, match="rank 0 kept rank 1 waiting"):
        ranks(2).run(silent, timeout=1)
