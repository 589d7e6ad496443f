"""The witness sees what a program does, hand-written communication and backward passes included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.checks import overlaps, peak_at_most
from labkit.evidence import Evidence, Witness
from labkit.exercises import Answer
from labkit.fresh import Nursery
from labkit.nursery import Limits
from labkit.player import play
from minimegatron import trace


def played(nursery: Nursery, source: str, function: str, inputs: dict[str, Any], ranks: int = 2) -> list[Evidence]:
    """The evidence of each rank of a call."""
    job: dict[str, Any] = {
        "sources": {"talk": source}, "exercise": "talk", "function": function, "drive": None, "seconds": 10,
        "world": ranks, "members": list(range(ranks)), "groups": [], "strided": [False], "late": [[]],
        "trials": [inputs], "hidden": "/nowhere", "without": [], "prepared": None,
    }  # fmt: skip
    replies = nursery.call(play, [job] * ranks, Limits(seconds=10))
    return [Evidence.from_plain(reply.value["trials"][0]["evidence"]) for reply in replies]


BACKWARD = """
import torch, torch.distributed as dist

def talk(x):
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    Mean.apply(torch.ones(3, requires_grad=True)).sum().backward()

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


def test_what_a_backward_pass_sends_is_seen(nursery: Nursery) -> None:
    first, second = played(nursery, BACKWARD, "talk", {"x": torch.ones(4)})
    assert [(call.name, call.peer) for call in first.calls] == [("send", 1), ("all_reduce", -1)]
    assert (second.count("recv"), second.nbytes("recv", "all_reduce"), second.count()) == (1, 16 + 12, 2)


def test_layers_are_seen_in_a_notebook() -> None:
    with Witness(3) as witness, trace.span("layer", axis="tp", nbytes=7):
        pass
    [event] = witness.evidence().events
    assert (event.name, event.axis, event.nbytes, event.rank) == ("layer", "tp", 7, 3)


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


OVERLAP = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional

def overlapped(x, w):
    work = dist.all_reduce(x, async_op=True)
    y = w @ w
    work.wait()
    return y

def waiting(x, w):
    dist.all_reduce(x)
    return w @ w

def never_waited(x, w):
    dist.all_reduce(x, async_op=True)
    return w @ w

def functionally(x, w):
    x = functional.all_reduce(x, "sum", dist.group.WORLD)
    y = w @ w
    return functional.wait_tensor(x).sum() + y.sum()
"""


def test_the_order_of_start_product_and_wait_is_seen(nursery: Nursery) -> None:
    inputs, work = {"x": torch.ones(4), "w": torch.ones(3, 3)}, 27
    names = ("overlapped", "waiting", "never_waited", "functionally")
    seen = {name: played(nursery, OVERLAP, name, inputs) for name in names}
    assert seen["overlapped"][0].order == (("all_reduce", 16), ("matmul", work), ("wait", 0))
    assert seen["waiting"][1].order == (("all_reduce", 16), ("wait", 0), ("matmul", work))
    assert seen["functionally"][0].order == seen["overlapped"][0].order
    assert seen["functionally"][0].count("all_reduce") == 1, "no way around the count"

    busy = overlaps("all_reduce", lambda _: work)
    passed = {name for name, one in seen.items() if busy(Answer(None, inputs, one)) is None}
    assert passed == {"overlapped", "functionally"}
    told = f"rank 0: 0 of {work} multiply-adds are done while"
    assert busy(Answer(0, inputs, seen["waiting"])) == f"{told} all_reduce travels"
    by_name = overlaps("all_reduce", lambda _: work, "the block")
    assert by_name(Answer(0, inputs, seen["waiting"])) == f"{told} the block travels"


def test_the_peak_is_of_what_lives_at_one_time() -> None:
    x = torch.ones(1000)
    with Witness() as short:
        for _ in range(10):
            y = x * 2
            y = y.view(10, 100).t()
    with Witness() as long:
        kept = [x + i for i in range(10)]
        x.add_(1)
    del kept
    with Witness() as given:
        x.view(-1)[:10]
    with Witness() as copied:
        copied.give({"state": [x]})
        copies = copy.deepcopy([x])
    assert short.evidence().peak == 8000, "the old y lives until the new one is there"
    assert long.evidence().peak == 40000
    assert given.evidence().peak == 0
    assert 4000 <= copied.evidence().peak < 4100, "x itself was given"
    assert copies[0].equal(x)
    answer = Answer(None, {}, [long.evidence(), short.evidence()])
    assert peak_at_most("all of them", lambda _: 40000)(answer) is None
    half = peak_at_most("half of them", lambda _: 20000)
    assert half(answer) == "it holds 40000 bytes at once; half of them is 20000", "it ran alone"
    of_ranks = Answer(None, [{}, {}], [short.evidence(), long.evidence()])
    assert half(of_ranks) == "rank 1 holds 40000 bytes at once; half of them is 20000"


def test_memory_is_freed_where_a_storage_is_resized() -> None:
    """FSDP frees weights so, and takes the memory again."""
    x = torch.ones(1000)
    with Witness() as freed:
        for _ in range(3):
            kept = torch.ones(1000)
            kept.untyped_storage().resize_(0)
            again = torch.ones(1000)
            kept.untyped_storage().resize_(4000)
            del again, kept
    with Witness() as given:
        x.view(-1)
        x.untyped_storage().resize_(0)
    assert freed.evidence().peak == 8000
    assert freed.alive() == 0
    assert given.evidence().peak == given.alive() == 0


def test_products_are_weighed_by_their_multiply_adds() -> None:
    a, b, batch = torch.ones(2, 3), torch.ones(3, 5), torch.ones(4, 2, 3)
    with Witness() as witness:
        a @ b, torch.addmm(torch.ones(5), a, b), torch.bmm(batch, b.expand(4, 3, 5)), a @ torch.ones(3)
        torch.nn.functional.linear(batch, b.t())
    assert [much for what, much in witness.evidence().order if what == "matmul"] == [30, 30, 120, 6, 120]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_sparse_tensors_count_their_indices_and_values(layout: torch.layout) -> None:
    """Attention could keep its S x S scores so."""
    with Witness() as witness:
        kept = torch.ones(100, 100).to_sparse(layout=layout)
        product = kept @ torch.ones(100, 1)
    assert product.shape == (100, 1)
    evidence = witness.evidence(witness.alive(product))
    values, indices = 40_000, 10_000 * 8
    assert evidence.largest >= indices
    assert evidence.peak >= values + indices
    assert evidence.alive >= values + indices
    assert kept.layout == layout
