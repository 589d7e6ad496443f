"""The judge's side of a running check: one process, to which every rank has its only connection.

    rank 0 ──line──┐
    rank 1 ──line──┤ broker: services by name          judge
    rank 2 ──line──┘   transport   collectives    ──── evidence ────>
                       memory      a GPU's memory
                       kernels     the emulator

Ranks share nothing but this process. A collective *is* a message to it, and there is no other way to get another rank's
data, so its counts cannot be avoided, and nothing that a rank says about itself is evidence. It trusts no byte: a
message that cannot be read ends its line; a rank that does not read its answers blocks only itself.

A service takes one message and returns the messages that follow, to any ranks. It never waits.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from labkit.channel import Frames, pack
from minimegatron.errors import DataError, MinimegatronError

_CHUNK = 1 << 20
_MAX_WAITING = 512 << 20  # bytes that a rank has not read yet
_MOST_REST = 256 << 20  # bytes of a rank that are still read when all have answered
_LOOK_SECONDS = 0.2  # between two calls of `Service.idle` while nothing arrives

Letter = tuple[int, dict[str, Any], Sequence[torch.Tensor]]  # rank, header, tensors


class Service(Protocol):
    """A service for ranks. An answer has the `id` of its question."""

    def handle(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        """The messages that follow from a message.

        Raises:
            Exception: the request is not possible; the rank gets the error.
        """

    def gone(self, rank: int) -> Iterable[Letter]:
        """The messages that follow from the end of a rank."""

    def idle(self) -> Iterable[Letter]:
        """The messages that follow from a moment in which nothing arrived."""

    def evidence(self) -> Any:
        """What happened, as plain data."""


def serve(lines: Sequence[socket.socket], control: socket.socket, services: Mapping[str, Service]) -> dict[str, Any]:
    """Answer ranks until something arrives on `control`, or it hangs up.

    Returns:
        {service: its evidence}.
    """
    broker = _Broker(lines, services)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ, -1)
        broker.register(selector)
        while True:
            ready = selector.select(_LOOK_SECONDS)
            if any(key.data == -1 for key, _ in ready):
                broker.read_rest()
                return {name: service.evidence() for name, service in services.items()}
            if not ready:
                broker.deliver(letter for service in services.values() for letter in service.idle())
            for key, events in ready:
                if events & selectors.EVENT_READ:
                    broker.read(key.data)
                if events & selectors.EVENT_WRITE:
                    broker.write(key.data)
            broker.register(selector)


class _Broker:
    """Received bytes and bytes to be sent, by rank."""

    def __init__(self, lines: Sequence[socket.socket], services: Mapping[str, Service]) -> None:
        self.lines, self.services = dict(enumerate(lines)), services
        self.frames = {rank: Frames() for rank in self.lines}
        self.waiting = {rank: bytearray() for rank in self.lines}
        self._known: dict[int, tuple[socket.socket, int]] = {}  # what the selector listens to, and for what
        for line in lines:
            line.setblocking(False)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Listen to every line, and, if bytes wait to be sent, for room to send them."""
        for rank, line in self.lines.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.waiting[rank] else 0)
            if rank not in self._known:
                selector.register(line, events, rank)
            elif self._known[rank][1] != events:
                selector.modify(line, events, rank)
            self._known[rank] = line, events
        for rank in self._known.keys() - self.lines.keys():
            selector.unregister(self._known.pop(rank)[0])

    def read_rest(self) -> None:
        """Read what ranks have sent before their answer and was not read yet."""
        for rank in [*self.lines]:
            for _ in range(_MOST_REST // _CHUNK):
                if not self.read(rank):
                    break

    def read(self, rank: int) -> bool:
        """Read what has arrived; returns whether there may be more."""
        if rank not in self.lines:
            return False
        try:
            data = self.lines[rank].recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.drop(rank)
            return False
        try:
            for header, tensors in self.frames[rank].feed(data):
                self.deliver(self._handled(rank, header, tensors))
        except DataError:
            self.drop(rank)
        return True

    def _handled(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        name, number = header.pop("to", None), header.get("id")
        if not isinstance(name, str) or name not in self.services:
            return [(rank, {"id": number, "error": f"there is no service {name!r}"[:80]}, ())]
        try:
            return list(self.services[name].handle(rank, header, tensors))
        except MinimegatronError as error:
            return [(rank, {"id": number, "error": error.what}, ())]
        except Exception as error:  # whatever a header made a service compute ends this request, not the check
            return [(rank, {"id": number, "error": f"{type(error).__name__}: {error}"[:200]}, ())]

    def deliver(self, letters: Iterable[Letter]) -> None:
        for rank, header, tensors in letters:
            if rank in self.lines:
                self.waiting[rank] += pack(header, tensors)
                self.write(rank)

    def write(self, rank: int) -> None:
        if rank not in self.lines:
            return
        waiting = self.waiting[rank]
        try:
            while waiting:
                with memoryview(waiting) as view, view[:_CHUNK] as chunk:
                    sent = self.lines[rank].send(chunk)
                del waiting[:sent]
        except BlockingIOError:
            if len(waiting) > _MAX_WAITING:
                self.drop(rank)
        except OSError:
            self.drop(rank)

    def drop(self, rank: int) -> None:
        """Close the line of a rank that has ended, or sent something that is no message."""
        line = self.lines.pop(rank, None)
        if line is None:
            return
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        self.deliver([letter for service in self.services.values() for letter in service.gone(rank)])
