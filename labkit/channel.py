"""The line between a learner's process and the judge's broker: messages of a header and tensors, never a pickle.

A process that runs a learner's code has no sockets, no files of others and no shared memory. All it can reach is
the other end of one socket pair, where `broker` listens. So everything that ranks send each other passes through the
judge, and its counts are true whatever a learner does to Python in their process.

    4 bytes   length of the header
    header    JSON: {"to": name of a service, "id": number of a question, ..., "tensors": [[dtype, shape], ...]}
    bytes     of the tensors, one after the other

`Frames` takes such messages out of bytes as they arrive, for the broker, which must not wait for half a message.
`Line` is the learner's end: `tell` sends, `ask` sends and waits for the answer with the same id.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from labkit import plain
from labkit.plain import DTYPES
from minimegatron.errors import DataError

MAX_HEADER = 1 << 20
MAX_BYTES = 256 << 20  # of the tensors of one message
_CHUNK = 1 << 20

Message = tuple[dict[str, Any], list[torch.Tensor]]


def pack(header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> bytes:
    """A message as bytes."""
    # As strided: a tensor of one number is contiguous with any stride, and only stride 1 can be seen as bytes.
    flat = [tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = json.dumps({**header, "tensors": shapes}).encode()
    # one number of a strided tensor is contiguous, and has a stride that `view` refuses
    raw = [t.as_strided(t.shape, (1,)).view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat]
    return b"".join((struct.pack("!I", len(head)), head, *raw))


class Frames:
    """Turns bytes into whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now.

        Raises:
            DataError: this is no message; nothing that follows can be read.
        """
        self._bytes += data
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        if len(self._bytes) < 4:
            return None
        (size,) = struct.unpack_from("!I", self._bytes)
        if size > MAX_HEADER:
            raise DataError(f"a message with a header of {size} bytes")
        if len(self._bytes) < 4 + size:
            return None
        header, shapes = _header(bytes(self._bytes[4 : 4 + size]))
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in shapes]
        end = 4 + size + sum(sizes)
        if len(self._bytes) < end:
            return None
        tensors, at = [], 4 + size
        for (dtype, shape), nbytes in zip(shapes, sizes, strict=True):
            raw = self._bytes[at : at + nbytes]
            at += nbytes
            tensors.append(torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape) if raw else torch.empty(
                shape, dtype=dtype))  # fmt: skip
        del self._bytes[:end]
        return header, tensors


def _header(text: bytes) -> tuple[dict[str, Any], list[tuple[torch.dtype, list[int]]]]:
    try:
        header = json.loads(text)
        shapes = [(DTYPES[name], [int(n) for n in shape]) for name, shape in header.pop("tensors")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"a message that cannot be read: {type(error).__name__}") from None
    if any(n < 0 for _, shape in shapes for n in shape) or len(shapes) > 1024:
        raise DataError("a message with tensors of impossible shapes")
    if sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes) > MAX_BYTES:
        raise DataError(f"a message of more than {MAX_BYTES >> 20} MiB")
    return header, shapes


class Line:
    """The learner's end. Threads may share it: each answer reaches the thread that asked.

    Args:
        sock: connected to the broker.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._frames, self._ids = sock, Frames(), itertools.count()
        self._sending, self._news = threading.Lock(), threading.Condition()
        self._answers: dict[int, Message] = {}
        self._reading = False
        self._over: str | None = None

    def tell(self, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> int:
        """Send a message; returns its id."""
        number = next(self._ids)
        data = pack({**header, "id": number}, tensors)
        with self._sending:
            self._socket.sendall(data)
        return number

    def ask(self, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Message:
        """Send, and wait for the answer.

        Raises:
            RuntimeError: the broker answers with an error, in its words; or it has ended.
        """
        number = self.tell(header, tensors)
        head, given = self._await(number)
        if "error" in head:
            raise RuntimeError(head["error"])
        return head, given

    def _await(self, number: int) -> Message:
        while True:
            with self._news:
                while number not in self._answers and self._reading and self._over is None:
                    self._news.wait(1.0)
                if number in self._answers:
                    return self._answers.pop(number)
                if self._over is not None:
                    raise RuntimeError(self._over)
                self._reading = True  # this thread reads for all
            try:
                self._read()
            finally:
                with self._news:
                    self._reading = False
                    self._news.notify_all()

    def _read(self) -> None:
        data = self._socket.recv(_CHUNK)
        found = list(self._frames.feed(data))
        with self._news:
            self._answers.update({head.get("id", -1): (head, tensors) for head, tensors in found})
            if not data:
                self._over = "the judge's broker has ended"


def confer(control: socket.socket, question: Any) -> Any:
    """Ask the judge a question from a process of its own (`Nursery.confer`); both trust each other.

    Raises:
        OSError: the judge has hung up.
    """
    send_plain(control, question)
    return receive_plain(control)


def send_plain(sock: socket.socket, value: Any) -> None:
    """Send plain data, after the number of its bytes."""
    text = plain.dumps(value, most=None).encode()
    sock.sendall(struct.pack("!Q", len(text)))
    sock.sendall(text)


def receive_plain(sock: socket.socket) -> Any:
    """Receive what `send_plain` sent.

    Raises:
        OSError: the other side has hung up, or the socket's deadline has passed.
    """
    (size,) = struct.unpack("!Q", _exactly(sock, 8))
    return plain.loads(_exactly(sock, size), most=None)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(_CHUNK, size - len(data)))
        if not part:
            raise ConnectionError("the other side has hung up")
        data += part
    return bytes(data)


_MINE: list[Line] = []


def attach(sock: socket.socket | None) -> None:
    """Set the line that `mine` returns in this process."""
    _MINE[:] = [] if sock is None else [Line(sock)]


def mine() -> Line:
    """The line of this process to the broker of its job.

    Raises:
        RuntimeError: it runs outside of a job, or the job has no broker.
    """
    if not _MINE:
        raise RuntimeError("this process has no line to a broker")
    return _MINE[0]
