"""The witness sees what a program does, hand-written communication and backward passes included."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.lab.evidence import Evidence, Witness
from minimegatron.lab.fresh import Nursery
from minimegatron.lab.nursery import Limits
from minimegatron.lab.player import play

TALK = """
import torch, torch.distributed as dist
from minimegatron import trace

def talk(x):
    rank = dist.get_rank()
    dist.all_reduce(x)
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    both = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty_like(x), 1 - rank)]
    [work.wait() for work in dist.batch_isend_irecv(both)]
    out = torch.empty(2 * len(x))
    dist.all_gather_into_tensor(out, x)
    dist.reduce_scatter_tensor(x, out)
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.broadcast(x, 0)
    dist.barrier()
    with trace.span("layer", axis="tp", nbytes=7):
        y = Mean.apply(torch.ones(3, requires_grad=True))
    y.sum().backward()

class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad
"""


def test_every_communication_is_seen(nursery: Nursery) -> None:
    job: dict[str, Any] = {
        "sources": {"talk": TALK}, "exercise": "talk", "function": "talk", "drive": None, "seconds": 10, "ranks": 2,
        "inputs": {"x": torch.ones(4)}, "hidden": "/nowhere",
    }  # fmt: skip
    replies = nursery.call(play, [job, job], Limits(seconds=10))
    first, second = (Evidence.from_plain(reply.value["evidence"]) for reply in replies)
    assert [call.name for call in first.calls] == [
        "all_reduce", "send", "send", "recv", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier",
        "all_reduce",
    ]  # fmt: skip
    assert [call.name for call in second.calls][1] == "recv"
    assert first.count("send", "recv") == 3 and first.nbytes("send") == 32 and first.nbytes("all_gather") == 32
    assert [call.peer for call in first.calls[:3]] == [-1, 1, 1]
    assert first.nbytes("all_reduce") == 16 + 12 and first.count() == 10
    [event] = first.events
    assert (event.name, event.axis, event.nbytes, event.rank) == ("layer", "tp", 7, 0)


def test_order_and_size_are_seen() -> None:
    with Witness() as witness:
        x = torch.ones(8, 8)
        (x @ x).sum()
    evidence = witness.evidence()
    assert evidence.ops == 3 and evidence.largest == 256 and evidence.count() == 0
    assert not dist.is_initialized()


def test_it_travels_as_plain_data() -> None:
    with Witness(3) as witness:
        torch.ones(2)
    assert Evidence.from_plain(witness.evidence().to_plain()) == witness.evidence()
