"""An OpenAI server of a few lines whose answers are scripts, and a clock that jumps to the next event."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable
from typing import Any

CLOSE, HANG = "close", "hang"
Script = list[bytes | str]


def plain(status: int, body: str, *headers: str, kind: str = "application/json") -> Script:
    """A response of known length."""
    lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body.encode())}", *headers]
    return ["\r\n".join([*lines, "", body]).encode()]


def stream(*pieces: str, end: bool = True) -> Script:
    """A stream of server-sent events; each piece is a chunk."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *(chunk(piece) for piece in pieces), *([b"0\r\n\r\n"] if end else [])]


def chunk(piece: str) -> bytes:
    return f"{len(piece.encode()):x}\r\n{piece}\r\n".encode()


def event(content: Any) -> str:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n"


def completion(*words: str, usage: tuple[int, int] | None = (3, 0)) -> list[str]:
    """The events of a completion."""
    events = [event({"choices": [{"index": 0, "text": word}]}) for word in words]
    events.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    if usage:
        tokens = usage[1] or len(words)
        events.append(event({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": tokens}}))
    return [*events, event("[DONE]")]


class FakeServer:
    """Answers each request with a script.

    Args:
        answer: (path, body, number of the request) -> what is written, in this order; `HANG` waits until the client
            goes, `CLOSE` closes the connection.

    Attributes:
        requests: (method, path, headers, body) of each.
        connections: how many there were.
        gone: a client went while its script hung.
    """

    def __init__(self, answer: Callable[[str, dict[str, Any], int], Script], port: int = 0) -> None:
        self.answer, self._wanted = answer, port
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self._writers: dict[asyncio.StreamWriter, asyncio.Task | None] = {}

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._wanted)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._server.close()
        tasks = [task for task in self._writers.values() if task]
        for writer in self._writers:
            writer.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers[writer] = asyncio.current_task()
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((method, path, headers, body))
                fields = json.loads(body) if body[:1] == b"{" else {}
                for step in self.answer(path, fields, len(self.requests) - 1):
                    if step == CLOSE:
                        return
                    if step == HANG:
                        await reader.read()
                        self.gone.set()
                        return
                    writer.write(step)
                    await writer.drain()
                    await asyncio.sleep(0)  # so that pieces are not one
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writers.pop(writer)
            writer.close()


class _Jumps(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def on_virtual_clock(main: Any) -> Any:
    """Run a coroutine whose sleeps take no time, and last exactly as long as they say."""
    jumps = _Jumps()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return jumps.now

    with asyncio.Runner(loop_factory=lambda: Loop(jumps)) as runner:
        return runner.run(main)
