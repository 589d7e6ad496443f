"""The broker and the lines to it: messages arrive whole, hostile bytes end their own line alone."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from labkit.broker import Letter, serve
from labkit.channel import Frames, Line, attach, mine, pack
from labkit.transport import Transport

from labkit.evidence import OpRecorder
from labkit.hbm import JudgedMemory, MemoryService
from minimegatron.errors import DataError


class Adder:
    """Adds 1 to tensors; answers `later` when the next message of any rank arrives."""

    def __init__(self) -> None:
        self.later: list[Letter] = []
        self.ended: list[int] = []

    def handle(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        if header["do"] == "fail":
            raise ValueError("no")
        answer: Letter = (rank, {"id": header["id"]}, [t + 1 for t in tensors])
        if header["do"] == "later":
            self.later.append(answer)
            return []
        kept, self.later = self.later, []
        return [answer, *kept]

    def gone(self, rank: int) -> Iterable[Letter]:
        self.ended.append(rank)
        return []

    def idle(self) -> Iterable[Letter]:
        return []

    def evidence(self) -> Any:
        return self.ended


@contextmanager
def broker(ranks: int, **more: Any) -> Iterator[tuple[list[socket.socket], Any]]:
    pairs = [socket.socketpair() for _ in range(ranks)]
    control, far = socket.socketpair()
    for near, _ in pairs:
        near.settimeout(20)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(serve, [theirs for _, theirs in pairs], far, {"add": Adder(), **more})
        try:
            yield [near for near, _ in pairs], lambda: (control.send(b"."), done.result(20))[1]
        finally:
            control.close()


def test_tensors_of_every_kind_come_back() -> None:
    with broker(1) as (sockets, end):
        line = Line(sockets[0])
        tensors = [
            torch.arange(6).view(2, 3).t(),
            torch.arange(6.0).view(3, 2)[:1, 1],
            torch.zeros(0, 3),
            torch.tensor(2.5),
            torch.ones(3, 1 << 18),
        ]
        _, back = line.ask({"to": "add", "do": "now"}, tensors)
        for got, sent in zip(back, tensors, strict=True):
            assert got.dtype == sent.dtype
            assert torch.equal(got, sent + 1)
        assert end() == {"add": []}


def test_an_answer_reaches_the_thread_that_asked() -> None:
    with broker(1) as (sockets, _):
        line, found = Line(sockets[0]), {}

        def late() -> None:
            found["late"] = line.ask({"to": "add", "do": "later"}, [torch.zeros(1)])[1][0].item()

        thread = threading.Thread(target=late, daemon=True)
        thread.start()
        for n in range(50):
            assert line.ask({"to": "add", "do": "now"}, [torch.full((1,), float(n))])[1][0].item() == n + 1
            thread.join(0.02)
        assert found == {"late": 1.0}


@pytest.mark.parametrize("what", ["service", "do", "fail"])
def test_what_cannot_be_is_told_to_the_rank_that_asked(what: str) -> None:
    header = {"service": {"to": "nothing", "do": "now"}, "do": {"to": "add"}, "fail": {"to": "add", "do": "fail"}}
    with broker(2) as (sockets, _):
        with pytest.raises(RuntimeError, match="no service|KeyError|ValueError: no"):
            Line(sockets[0]).ask(header[what])
        assert Line(sockets[1]).ask({"to": "add", "do": "now"}, [torch.zeros(1)])[1][0].item() == 1


def test_what_packs_a_message_is_no_operation_of_the_learners() -> None:
    service = MemoryService([{"q": torch.ones(100, 10)}])
    with broker(1, memory=service) as (sockets, end):
        attach(sockets[0])
        try:
            mine().ask({"to": "memory", "do": "trial"})
            with OpRecorder() as recorder:
                memory = JudgedMemory()
                tile = memory.load("q", 0, 50)
                memory.store("q", 50, 100, tile)
        finally:
            attach(None)
        assert recorder.ops == 1, "the copy of what was loaded"
        assert recorder.evidence().peak == tile.nbytes == 2000
        [moved] = end()["memory"]
        assert (moved["loaded"], moved["stored"]) == ({"q": 500}, {"q": 500})


HOSTILE: list[dict[str, Any]] = [
    {"verb": "wait", "names": ["never"], "seconds": 10**400},
    {"verb": "add", "names": ["n"], "amount": math.inf},
]


@pytest.mark.parametrize("asked", HOSTILE, ids=["seconds", "amount"])
def test_a_number_that_cannot_be_computed_with_ends_the_request_alone(asked: dict[str, Any]) -> None:
    with broker(2, transport=Transport(2)) as (sockets, end):
        with pytest.raises(RuntimeError, match="OverflowError"):
            Line(sockets[0]).ask({"to": "transport", "do": "keys", **asked})
        assert Line(sockets[1]).ask({"to": "add", "do": "now"}, [torch.zeros(1)])[1][0].item() == 1
        assert end()["add"] == [], "both lines are open"


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff" * 64,
        b"\0\0\0\2{}",
        b"\0\0\0\2[]",
        b"\0\0\0\5nope!",
        pack({"to": "add", "do": "now"}).replace(b'"tensors": []', b'"tensors": 1 '),
        b"\0\0\0\x30" + b'{"tensors": [["float32", [99999999, 99999999]]]}',
        b"\0\0\0\x22" + b'{"tensors": [["float32", [-1, 1]]]}'[:0x22],
    ],
)
def test_bytes_that_are_no_message_end_their_line_alone(bad: bytes) -> None:
    with broker(2) as (sockets, end):
        sockets[0].sendall(bad)
        assert sockets[0].recv(1) == b""
        assert Line(sockets[1]).ask({"to": "add", "do": "now"}, [torch.zeros(1)])[1][0].item() == 1
        assert end() == {"add": [0]}


def test_half_a_message_and_an_unread_answer_stop_no_other_rank() -> None:
    with broker(3) as (sockets, end):
        sockets[0].sendall(pack({"to": "add", "do": "now", "id": 0}, [torch.zeros(100)])[:50])
        sockets[1].sendall(pack({"to": "add", "do": "now", "id": 0}, [torch.zeros(1 << 21)]))
        for _ in range(20):
            assert Line(sockets[2]).ask({"to": "add", "do": "now"}, [torch.zeros(1)])[1][0].item() == 1
        assert end() == {"add": []}


def test_a_line_says_when_the_broker_has_ended() -> None:
    with broker(1) as (sockets, end):
        line = Line(sockets[0])
        end()
        sockets[0].shutdown(socket.SHUT_RD)
        with pytest.raises(RuntimeError, match="broker has ended"):
            line.ask({"to": "add", "do": "now"})


def test_frames_take_messages_out_of_any_cut() -> None:
    data = b"".join(pack({"n": n}, [torch.full((n,), float(n))]) for n in range(5))
    frames, found = Frames(), []
    for i in range(0, len(data), 7):
        found += list(frames.feed(data[i : i + 7]))
    assert [(head["n"], t.tolist()) for head, [t] in found] == [(n, [float(n)] * n) for n in range(5)]
    with pytest.raises(DataError):
        list(Frames().feed(b"\x7f" + bytes(8)))


def test_what_was_sent_before_the_end_is_heard() -> None:
    """A rank that tells and then answers: the order to end comes by another way, and may be seen first."""
    mine, theirs = socket.socketpair()
    control, far = socket.socketpair()
    adder = Adder()
    for number in range(3):
        mine.sendall(pack({"to": "add", "do": "later", "id": number}))
    control.sendall(b".")
    serve([theirs], far, {"add": adder})
    assert len(adder.later) == 3
    for one in (mine, theirs, control, far):
        one.close()
