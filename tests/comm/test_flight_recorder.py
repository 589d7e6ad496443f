"""What a rank remembers of its communications: order, states, stack; and what outlives it."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest
import torch

from minimegatron.comm import async_ops, flight_recorder
from minimegatron.comm.async_ops import Work, blocking, issue
from minimegatron.comm.axis import Axis
from minimegatron.comm.flight_recorder import FlightRecorder
from minimegatron.comm.last_calls import SLOTS, Page
from minimegatron.comm.transport import FakeTransport, Started

TP, DP = Axis("tp", (2, 5), 1), Axis("dp", (5, 7), 0)


class Handle:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def recorder() -> Any:
    found = FlightRecorder(8)
    with async_ops.alone(FakeTransport(), found):
        yield found


def begin(op: str, axis: Axis = TP, handle: Handle | None = None, **fields: Any) -> Work:
    x = torch.ones(2, 3)
    return issue(Work(x, op, axis, x=x, **fields), lambda _: Started([handle or Handle()]))


def test_a_call_is_started_until_it_was_waited_for(recorder: FlightRecorder) -> None:
    work = begin("all_reduce")
    (entry,) = recorder.entries
    assert (entry.state, entry.blocks, entry.waiting) == ("started", False, 0)
    work.wait()
    assert (entry.state, entry.blocks) == ("completed", False)
    assert entry.created <= entry.started <= entry.waiting <= entry.completed
    assert entry.sent == entry.received == (torch.Size([2, 3]), torch.float32)


def test_a_wait_that_raises_is_one_that_was_in_vain(recorder: FlightRecorder) -> None:
    work = begin("all_reduce", handle=Handle(RuntimeError("Timed out waiting")))
    with pytest.raises(RuntimeError):
        work.wait()
    entry = recorder.entries[-1]
    assert entry.blocks and entry.failed and entry.state == "started"
    with pytest.raises(RuntimeError), blocking("all_gather_object", TP):
        assert recorder.entries[-1].blocks, "it waits inside of the call"
        raise RuntimeError
    with blocking("all_gather_object", TP):
        pass
    assert [e.state for e in recorder.entries] == ["started", "started", "completed"]


def test_calls_are_numbered_by_group_and_messages_by_edge(recorder: FlightRecorder) -> None:
    for axis, message in [(TP, None), (DP, None), (TP, None), (TP, (2, 5)), (TP, (5, 2)), (TP, (2, 5))]:
        begin("all_reduce" if message is None else "deliver", axis, message=message)
    numbers = [(e.group.name, e.seq) for e in recorder.entries]
    assert numbers == [
        ("tp:2-5", 1), ("dp:5-7", 1), ("tp:2-5", 2), ("tp:2->5", 1), ("tp:5->2", 1), ("tp:2->5", 2)
    ]  # fmt: skip
    assert [e.record for e in recorder.entries] == list(range(6))


def test_two_axes_over_one_group_have_one_order(recorder: FlightRecorder) -> None:
    group: Any = object()
    for name in ("dp", "world", "dp"):
        begin("all_reduce", Axis(name, (2, 5), 1, group))
    assert [e.seq for e in recorder.entries] == [1, 2, 3]


def test_a_group_in_python_that_has_no_name_is_called_after_its_axis(recorder: FlightRecorder) -> None:
    class Backend(torch.distributed.ProcessGroup):
        pass

    begin("all_reduce", Axis("dp", (5, 7), 0, Backend(0, 2)))
    group = recorder.entries[-1].group
    assert (group.name, group.desc, group.ranks) == ("dp:5-7", "dp", (5, 7))


def test_the_stack_is_that_of_the_call(recorder: FlightRecorder) -> None:
    def caller() -> None:
        begin("all_reduce")

    caller()
    names = [place.name for place in recorder.entries[-1].frames()]
    assert names[:2] == ["begin", "caller"]
    place = recorder.entries[-1].frames()[1]
    assert place.filename == __file__ and place.line == caller.__code__.co_firstlineno + 1


def test_a_buffer_forgets_the_oldest_and_keeps_more_in_a_window(recorder: FlightRecorder) -> None:
    for _ in range(10):
        begin("all_reduce").wait()
    assert [e.seq for e in recorder.entries] == list(range(3, 11))
    with recorder.keeping(100):
        for _ in range(10):
            begin("all_reduce")
        assert len(recorder.entries) == 18
    assert [e.seq for e in recorder.entries] == list(range(13, 21))


def test_the_last_calls_are_there_for_others_to_read(recorder: FlightRecorder) -> None:
    assert recorder.last is not None
    page = Page(recorder.last.where)
    assert page.calls() == []
    for _ in range(SLOTS):
        begin("all_reduce")
    begin("deliver", message=(5, 2), extra="max")
    with blocking("all_gather_object", DP):
        pass
    first, *_, message, objects = page.calls()
    assert len(page.calls()) == SLOTS and first["number"] == 3
    assert (message["op"], message["sends"], message["extra"]) == ("deliver", True, "max")
    assert (message["group"], message["shape"]) == (("tp:5->2", "tp", "gloo", (2, 5)), [2, 3])
    assert message["dtype"] == "torch.float32" and message["place"][0] == __file__
    assert objects["shape"] is None and objects["group"][3] == (5, 7)


def test_kinds_that_do_not_fit_into_the_page_are_left_out(recorder: FlightRecorder) -> None:
    assert recorder.last is not None
    page, many = Page(recorder.last.where), 4000
    for number in [*range(many), 0]:
        begin(f"an operation with a long name {number}").wait()
    (last,) = page.calls()
    assert (last["op"], last["number"]) == ("an operation with a long name 0", many + 1)


def test_a_recorder_that_is_gone_has_no_memory_left() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # those of other tests
    before = files()
    for _ in range(3):
        assert FlightRecorder(8).last is not None
    gc.collect()
    assert files() == before


def test_nothing_is_recorded_with_a_buffer_of_none() -> None:
    before = len(async_ops._state.observers)
    with contextlib.ExitStack() as stack:
        stack.callback(flight_recorder.start, 0)
        assert flight_recorder.start(4) is flight_recorder.running()
        assert len(async_ops._state.observers) == before + 1
        assert flight_recorder.start(0) is flight_recorder.running() is None
    assert len(async_ops._state.observers) == before
