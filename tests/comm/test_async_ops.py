"""The one door: who is told what and when, what an error says, what a transport may be."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm import collectives as c
from minimegatron.comm.async_ops import Observer, Work, blocking, issue, waited_for, waiting
from minimegatron.comm.axis import Axis
from minimegatron.comm.ring import Shift, circulate
from minimegatron.comm.transport import FakeTransport, Started

TP = Axis("tp", (2, 5), 1)  # without a group: nothing of this can reach torch
BLOCKED = ("all_reduce", "tp", (2, 5))


class Handle:
    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self._wait = wait

    def wait(self) -> None:
        self._wait()


class Notes(Observer):
    """What it is told, and whether the rank is known to be blocked then."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def _note(self, when: str, work: Work) -> None:
        self.told.append((when, work.op, work.failed, waiting() is not None))

    def issue(self, work: Work) -> None:
        self._note("issue", work)

    def issued(self, work: Work) -> None:
        self._note("issued", work)

    def wait(self, work: Work) -> None:
        self._note("wait", work)

    def waited(self, work: Work) -> None:
        self._note("waited", work)


@pytest.fixture
def notes() -> Iterator[Notes]:
    observer = Notes()
    async_ops.add_observer(observer)
    yield observer
    async_ops.remove_observer(observer)


def begin(handle: Handle, **fields: Any) -> Work:
    return issue(Work(torch.ones(1), "all_reduce", TP, **fields), lambda _: Started([handle]))


def reset() -> None:
    raise RuntimeError("Connection reset by peer")


def test_observers_are_told_of_the_call_and_of_one_wait(notes: Notes) -> None:
    finished = []
    work = issue(Work("result", "all_reduce", TP), lambda _: Started([Handle()], lambda: finished.append(waiting())))
    assert work.wait() == work.wait() == "result" and finished == [BLOCKED]
    told = [("issue", True), ("issued", False), ("wait", True), ("waited", False)]
    assert notes.told == [(when, "all_reduce", False, blocked) for when, blocked in told]
    assert async_ops.last() == BLOCKED and Work("over an axis of one").wait() and len(notes.told) == 4


def test_a_call_or_a_wait_that_raises_is_over_and_its_error_says_what_it_was(notes: Notes) -> None:
    work = begin(Handle(reset), event={"name": "all_reduce"})
    calls: list[Callable[[], object]] = [
        work.wait,
        lambda: issue(Work(None, "all_reduce", TP), lambda _: Started([reset()])),
    ]
    for call in calls:
        with trace.record() as log, pytest.raises(RuntimeError) as caught:
            call()
        assert notes.told[-1] == ("waited" if call == work.wait else "issued", "all_reduce", True, False)
        assert waiting() is None and log.events == []
        copy = pickle.loads(pickle.dumps(caught.value))  # as the error of a warm rank travels
        assert waited_for(copy) == BLOCKED and copy.__notes__ == [
            "while rank 5 waited: all_reduce over tp (ranks 2, 5)"
        ]
    assert waited_for(RuntimeError("of its own")) is None


def test_of_communications_inside_of_each_other_the_outermost_is_named() -> None:
    def compares(_: Any) -> Started:
        with blocking("a comparison", TP):
            assert waiting() == BLOCKED
            reset()
        raise AssertionError

    with pytest.raises(RuntimeError) as caught:
        issue(Work(None, "all_reduce", TP), compares)
    assert waited_for(caught.value) == BLOCKED and waiting() is None


def test_what_a_programs_own_thread_waits_for_is_not_what_the_rank_waits_for() -> None:
    entered, leave = threading.Event(), threading.Event()

    def background() -> None:
        with blocking("all_gather_object", TP):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=background)
    thread.start()
    assert entered.wait(20) and waiting() is None
    with blocking("all_reduce", TP):
        assert waiting() == BLOCKED
    leave.set()
    thread.join(20)


def test_on_fake_tensors_a_fake_transport_moves_nothing_and_all_is_counted() -> None:
    with FakeTensorMode(), async_ops.transport(FakeTransport()), trace.record() as log:
        x = torch.empty(6, 3, requires_grad=True)
        shapes = [tuple(c.all_gather(x, TP).shape), tuple(c.reduce_scatter(x, TP).shape)]
        shapes += [tuple(c.all_to_all(x, TP, [4, 5], [3, 3]).shape), tuple(Shift(x.detach(), TP).wait().shape)]
        c.gather_from_region(c.copy_to_region(x, TP), TP, reduce_gradient=True).sum().backward()
        circulate(x.detach(), TP, lambda _, block: shapes.append(tuple(block.shape)))
        c.broadcast(x, TP)
    assert shapes == [(12, 3), (3, 3), (9, 3), (6, 3), (6, 3), (6, 3)] and x.grad.shape == x.shape
    assert {name: row["nbytes"] for name, row in log.summary().items()} == {
        "all_gather/tp": 2 * 144, "reduce_scatter/tp": 72 + 144, "all_to_all/tp": 108, "ring_shift/tp": 2 * 72,
        "all_reduce/tp": 72, "broadcast/tp": 72,
    }  # fmt: skip
