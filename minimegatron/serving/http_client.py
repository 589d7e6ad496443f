"""An HTTP/1.1 client for streams: every piece of a body has the time of its arrival.

The problem in a sentence: a load generator and a router need each piece of a stream at once and with little work; a
load generator that is busy reading measures itself.

    Client.request -> Response: status, headers, then (seconds, bytes) pairs

The socket's callback timestamps the bytes by the event loop's clock, before `h11` parses them. A connection whose
response was read to its end is reused. Proxy variables of the environment are ignored, and redirects are not followed.
The caller sets deadlines: `asyncio.timeout(seconds)` around what it awaits.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

import h11

from minimegatron.errors import ConfigError

READ_AHEAD = 256  # pieces buffered for a slow reader; above it the socket is paused
Headers = Iterable[tuple[str, str]]


class Disconnected(ConnectionError):
    """The server closed the connection before the end of the response."""


class BadResponse(ConnectionError):
    """The response is not valid HTTP, or not what was expected."""


@dataclasses.dataclass
class Response:
    """A response whose body is not read yet.

    Attributes:
        status: of HTTP.
        headers: (name in lower case, value) pairs, in their order.
    """

    status: int
    headers: list[tuple[str, str]]
    _connection: _Connection

    def header(self, name: str) -> str:
        """The value of a header; "" if it is missing."""
        return next((value for key, value in self.headers if key == name), "")

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body as it arrives: (time, bytes) pairs.

        Raises:
            Disconnected, BadResponse: the body ends too early, or is malformed.
        """
        while True:
            when, event = await self._connection.event()
            if isinstance(event, h11.Data):
                yield when, bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def read(self, limit: int = 64 << 20) -> bytes:
        """The whole body.

        Raises:
            BadResponse: it has more than `limit` bytes.
            Disconnected: it ends too early.
        """
        parts, size = [], 0
        async for _, piece in self.pieces():
            size += len(piece)
            if size > limit:
                raise BadResponse(f"a body of more than {limit} bytes")
            parts.append(piece)
        return b"".join(parts)


class _Connection(asyncio.Protocol):
    """A socket, the bytes that arrived on it, and its HTTP state."""

    def __init__(self) -> None:
        self.http = h11.Connection(h11.CLIENT)
        self.answered = False  # a byte of the current response has arrived
        self._loop = asyncio.get_running_loop()
        self._arrived: collections.deque[tuple[float, bytes]] = collections.deque()
        self._when = 0.0
        self._over = self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived.append((self._loop.time(), data))
        if len(self._arrived) > READ_AHEAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        return not self._over and not self._arrived and not self.transport.is_closing()

    def send(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        self.answered = False
        request = h11.Request(method=method, target=target, headers=list(headers))
        parts = [self.http.send(request), self.http.send(h11.Data(body)) if body else b""]
        self.transport.write(b"".join(part or b"" for part in [*parts, self.http.send(h11.EndOfMessage())]))

    async def event(self) -> tuple[float, h11.Event]:
        """The next event of the response, with the arrival time of its last byte."""
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError as error:
                if self._over:
                    raise self._cut() from error
                raise BadResponse(str(error)) from error
            if event is h11.NEED_DATA:
                await self._more()
            elif isinstance(event, h11.ConnectionClosed | h11.PAUSED):
                raise self._cut()
            elif not isinstance(event, h11.InformationalResponse):
                return self._when, event  # type: ignore[return-value]

    def _cut(self) -> Disconnected:
        return Disconnected(f"the connection was closed {'within' if self.answered else 'before'} the answer")

    async def _more(self) -> None:
        if not self._arrived and not self._over:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._arrived:
            self._when, data = self._arrived.popleft()
            self.answered = True
            self.http.receive_data(data)
            if self._paused and len(self._arrived) < READ_AHEAD // 2:
                self._paused = False
                self.transport.resume_reading()
        else:
            self.http.receive_data(b"")


class Client:
    """Requests to one server.

    Args:
        base_url: `http://host:port` or `https://...`; its path is put before each request's.
        headers: of every request.
        connect_timeout: seconds to connect.
        reuse: keep connections for later requests. If the server closed a kept connection, the request is sent once
            more on a new one; without reuse no request is ever sent twice.

    Raises:
        ConfigError: `base_url` is not a URL of HTTP.
    """

    def __init__(
        self, base_url: str, headers: Headers = (), connect_timeout: float = 10.0, *, reuse: bool = True
    ) -> None:
        try:
            url = urlsplit(base_url)
            self.host, port = url.hostname or "", url.port
        except ValueError as error:
            raise ConfigError(f"{base_url!r} is no address: {error}", fix="http://127.0.0.1:8000") from error
        if url.scheme not in ("http", "https") or not self.host or url.query:
            raise ConfigError(f"{base_url!r} is no address of a server", fix="http://127.0.0.1:8000")
        self.secure = url.scheme == "https"
        self.port = port or (443 if self.secure else 80)
        self.path, self.connect_timeout, self.reuse = url.path.rstrip("/"), connect_timeout, reuse
        self.headers = [("host", url.netloc.rpartition("@")[2]), *headers]
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Headers = ()
    ) -> AsyncIterator[Response]:
        """Send a request, and yield its response when the headers are there.

        If the block is left before the end of the body, the connection is closed, so the server sees the client leave.

        Raises:
            OSError: the server cannot be reached; TimeoutError: not within `connect_timeout`.
            Disconnected, BadResponse: the connection was closed, or the response is not HTTP.
        """
        length = [("content-length", str(len(body)))] if body or method == "POST" else []
        everything = [*self.headers, *headers, *length]
        while True:
            connection, fresh = await self._connection()
            try:
                connection.send(method, self.path + path, everything, body)
                _, head = await connection.event()
            except Disconnected:
                connection.transport.abort()
                if not fresh and not connection.answered:  # it was closed while idle: the request was not read
                    continue
                raise
            except BaseException:
                connection.transport.abort()
                raise
            break
        assert isinstance(head, h11.Response), "a response begins with its head"
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers]
        try:
            yield Response(head.status_code, pairs, connection)
        finally:
            over = connection.http.our_state is h11.DONE and connection.http.their_state is h11.DONE
            if self.reuse and over and connection.usable:
                connection.http.start_next_cycle()
                self._idle.append(connection)
            else:
                connection.transport.abort()

    async def _connection(self) -> tuple[_Connection, bool]:
        """(a connection, whether it is new)."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection, False
            connection.transport.abort()
        context = ssl.create_default_context() if self.secure else None
        async with asyncio.timeout(self.connect_timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, self.host, self.port, ssl=context
            )
        return connection, True

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().transport.abort()


class ServerSentEvents:
    """Parses server-sent events from pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """The `data` of each event that this piece completes.

        Raises:
            BadResponse: an event is not UTF-8.
        """
        *whole, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        try:
            found = [[line[5:] for line in event.decode().split("\n") if line.startswith("data:")] for event in whole]
        except UnicodeDecodeError as error:
            raise BadResponse(f"an event is not UTF-8: {error}") from error
        return ["\n".join(line.removeprefix(" ") for line in lines) for lines in found if lines]
