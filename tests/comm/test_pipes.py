"""Pipes keep gloo's promises: order by tag, a deadline, the end of a neighbour, nothing torn."""

from __future__ import annotations

import os
import threading
import time

import pytest

from minimegatron.comm import pipes
from minimegatron.comm.pipes import Pipes
from minimegatron.launch.error_report import is_consequence, timed_out


def pair(seconds: float = 20.0) -> tuple[Pipes, Pipes]:
    """Two ranks of a group of two, both in this process."""
    ends = Pipes(2, 0, seconds), Pipes(2, 1, seconds)
    for rank, mine in enumerate(ends):
        mine.open(1 - rank, os.getpid(), ends[1 - rank].offer()[rank])
    for mine in ends:
        mine.all_open()
    return ends


def numbers(first: int) -> tuple[int, ...]:
    return first, -(2**62), 0, 3, first


def test_the_nth_ticket_of_a_tag_gets_its_nth_message_in_whatever_order_they_are_waited_for() -> None:
    a, b = pair()
    tickets = [b.expect(0, tag) for tag in (7, 7, 1)]
    for first, tag in ((10, 1), (20, 7), (30, 7)):
        a.write(1, numbers(first), tag, "rank 1")
    found = {ticket: b.take(0, ticket, "rank 0")[0] for ticket in reversed(tickets)}
    assert [found[ticket] for ticket in tickets] == [20, 30, 10]
    late = b.expect(0, 7)  # a ticket may be made after its message has come
    a.write(1, numbers(40), 7, "rank 1")
    assert b.take(0, late, "rank 0") == numbers(40)


def test_a_wait_ends_at_the_deadline_and_names_the_sender() -> None:
    _, b = pair(0.05)
    with pytest.raises(RuntimeError, match="Timed out waiting 50ms for a message from rank 0") as error:
        b.take(0, b.expect(0, 0), "rank 0")
    assert timed_out(error.value)


def test_what_was_sent_before_the_end_of_the_sender_arrives_and_then_its_end() -> None:
    a, b = pair()
    a.write(1, numbers(1), 0, "rank 1")
    a.close()
    first, second = b.expect(0, 0), b.expect(0, 0)
    assert b.take(0, first, "rank 0") == numbers(1)
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0") as error:
        b.take(0, second, "rank 0")
    assert is_consequence(error.value)
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
        b.close()
        b.write(0, numbers(2), 0, "rank 0")


def test_the_end_of_a_sender_is_seen_although_its_child_lives_on() -> None:
    b = Pipes(2, 1, 5.0)
    go, done = os.pipe(), os.pipe()
    sender = os.fork()
    if sender == 0:  # what it has inherited of `b` is closed; its parent has it
        os.close(go[1])
        a = Pipes(2, 0, 20.0)
        a.open(1, os.getppid(), int(os.read(go[0], 20)))
        if os.fork() == 0:
            os.read(go[0], 1)  # until the test ends
            os._exit(0)
        os.write(done[1], b"x")
        os._exit(0)
    os.write(go[1], str(b.offer()[0]).encode())
    assert os.read(done[0], 1) == b"x"
    os.waitpid(sender, 0)
    b.all_open()
    try:
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
            b.take(0, b.expect(0, 0), "rank 0")
    finally:
        os.close(go[1])


def test_a_sender_waits_while_the_pipe_is_full_and_stops_at_the_deadline() -> None:
    a, b = pair(0.2)
    sent = 0
    with pytest.raises(RuntimeError, match="Timed out waiting 200ms for rank 1 to read a message"):
        while True:
            a.write(1, numbers(sent), 0, "rank 1")
            sent += 1
    reader = threading.Timer(0.05, lambda: [b.take(0, b.expect(0, 0), "rank 0") for _ in range(sent)])
    reader.start()
    a.write(1, numbers(-1), 0, "rank 1")  # as soon as there is room
    reader.join()
    assert b.take(0, b.expect(0, 0), "rank 0") == numbers(-1)


def test_two_threads_that_wait_for_one_sender_get_a_message_each() -> None:
    a, b = pair()
    found: list[int] = []
    tickets = [b.expect(0, 0), b.expect(0, 1)]
    threads = [threading.Thread(target=lambda t=t: found.append(b.take(0, t, "rank 0")[0])) for t in tickets]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    a.write(1, numbers(2), 1, "rank 1")
    a.write(1, numbers(1), 0, "rank 1")
    for thread in threads:
        thread.join(10)
    assert sorted(found) == [1, 2]


def test_close_all_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    kept = pair()
    pipes.close_all()
    assert set(os.listdir("/proc/self/fd")) <= before
    del kept
