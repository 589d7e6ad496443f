"""One address in front of N servers: which one answers a request, and what happens when one dies.

    clients --> router --> minimegatron serve, replica 0        each with its own weights, pages and processes
                      +--> ...
                      +--> minimegatron serve, replica N-1

`serving/balance` chooses the replica of a request. This file passes the request on:

| event                                         | effect on the request                                            |
|-----------------------------------------------|------------------------------------------------------------------|
| the replica cannot be reached, or dies before | it is sent to another replica; after a second death the client   |
| a byte of its answer was passed on            | gets 502, since the request itself may cause them                |
| the replica dies after that                   | its stream ends with an `error` event and without `[DONE]`       |
| the replica refuses (429, 503)                | it is sent to the next; the last refusal is passed on            |
| the replica sends nothing for `timeout` s     | 504, or the `error` event: another replica would take as long    |
| the client disconnects                        | the router closes its connection to the replica, which aborts it |
| no replica is ready                           | 503 with Retry-After                                             |

`/health` and `/metrics` report on all replicas: each sample has the label `engine="i"`, as with vLLM's data
parallelism. The router passes `authorization` on, and replicas check it. `serving/replicas` runs their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from minimegatron.errors import require
from minimegatron.serving.balance import Replica, Ring, beginning, choose
from minimegatron.serving.http_client import Client, Disconnected, Response

log = logging.getLogger(__name__)

MAX_BODY, BODY_TIMEOUT = 10 << 20, 60.0  # most bytes of a request's body, and most seconds until it has arrived
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authorization"}
REFUSALS = (429, 503)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Router:
    """An ASGI application that passes requests on to replicas.

    Args:
        addresses: `http://host:port` of each replica.
        timeout: most seconds to the first piece of an answer, and between two.
        health_timeout: most seconds for a replica to answer `/health` and `/metrics`.

    Attributes:
        replicas: the state of each.
        draining: new requests get 503.
        retries: total requests sent to another replica.
    """

    def __init__(self, addresses: Sequence[str], timeout: float = 600.0, health_timeout: float = 5.0) -> None:
        require(len(addresses) > 0, "a router without replicas", "one address or more")
        self.replicas = [Replica(i, Client(address, reuse=False)) for i, address in enumerate(addresses)]
        self.timeout, self.health_timeout = timeout, health_timeout
        self.ring = Ring(range(len(addresses)))
        self.draining, self.retries = False, 0

    @property
    def under_way(self) -> int:
        """Open requests of all replicas."""
        return sum(r.under_way for r in self.replicas)

    async def check(self, replica: Replica) -> None:
        """Ask a replica for `/health`, and log a change."""
        try:
            async with asyncio.timeout(self.health_timeout), replica.client.request("GET", "/health") as response:
                await response.read()
                replica.answered = asyncio.get_running_loop().time()
                healthy, why = response.status == 200, f"GET /health answers {response.status}"
        except OSError as error:  # TimeoutError is one
            healthy, why = False, f"GET /health: {str(error) or type(error).__name__}"
        if healthy and not replica.ready:
            log.info("replica %d is ready", replica.number)
            replica.ready = True
        elif not healthy:
            self.lost(replica, why)

    def lost(self, replica: Replica, why: str) -> None:
        """Send a replica no requests until its next successful `check`."""
        if replica.ready:
            log.warning("replica %d is not ready: %s", replica.number, why)
        replica.ready = False

    async def watch(self, seconds: float = 2.0) -> None:
        """Check all replicas every so many seconds, until this task is cancelled."""
        while True:
            await asyncio.gather(*map(self.check, self.replicas))
            await asyncio.sleep(seconds)

    # ------------------------------------------------------------------------------------------------ ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        path = scope["path"]
        if path == "/health" and scope["method"] == "GET":
            ok = any(r.ready for r in self.replicas) and not self.draining
            told = {"status": "ok" if ok else "unavailable", "replicas": [r.state() for r in self.replicas]}
            return await _answer(send, 200 if ok else 503, told)
        if path == "/metrics" and scope["method"] == "GET":
            return await self._metrics(scope, send)
        if self.draining:
            return await _error(send, 503, "the server is shutting down", retry_after=10)
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                body = await _body(receive)
        except _Gone:
            return None
        except TimeoutError:
            return await _error(send, 408, f"the body has not come within {BODY_TIMEOUT:g} s")
        if body is None:
            return await _error(send, 413, f"the body has more than {MAX_BODY} bytes")
        await self._pass_on(scope, body, receive, send)

    async def _pass_on(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request by `_ask`, and cancel that if the client disconnects."""
        answer = asyncio.ensure_future(self._ask(scope, body, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)  # deadlines are `_ask`'s
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer

    async def _ask(self, scope: Scope, body: bytes, send: Send) -> None:
        key = beginning(body) if body else None
        tried, deaths = set[int](), 0
        refusal: _Refused | None = None
        while (replica := choose(self.replicas, self.ring, key, tried)) is not None:
            self.retries += bool(tried)
            tried.add(replica.number)
            replica.under_way += 1
            started = _Started(send)
            try:
                await self._exchange(replica, scope, body, started)
                replica.served += 1
                return
            except _Refused as error:
                refusal = error
            except OSError as error:
                replica.failed += 1
                why = str(error) or f"nothing for {self.timeout:g} s"
                log.warning("replica %d failed a request: %s", replica.number, why)
                if not isinstance(error, TimeoutError):
                    self.lost(replica, why)
                if started.begun:
                    return await started.end_with(f"replica {replica.number} failed: {why}")
                deaths += 1
                if deaths == 2 or isinstance(error, TimeoutError):
                    status = 504 if isinstance(error, TimeoutError) else 502
                    return await _error(send, status, f"replica {replica.number} failed: {why}")
            finally:
                replica.under_way -= 1
        if refusal is not None:
            return await _raw(send, refusal.status, refusal.headers, refusal.body)
        await _error(send, 503, "no replica is ready", retry_after=5)

    async def _exchange(self, replica: Replica, scope: Scope, body: bytes, send: _Started) -> None:
        """Pass a request to a replica, and its answer to the client.

        Raises:
            OSError: the replica failed; `send.begun` tells whether the client has received a part of the answer.
            _Refused: the replica is full or not ready.
        """
        path = scope["path"] + (f"?{query}" if (query := scope.get("query_string", b"").decode("latin-1")) else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.decode("latin-1") not in HOP_BY_HOP | {"host", "content-length", "expect"}
        ]
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self.timeout):
                request = replica.client.request(scope["method"], path, body, headers)
                response = await stack.enter_async_context(request)
                if not _is_stream(response):
                    whole = await response.read()
                    if response.status in REFUSALS:
                        raise _Refused(response.status, response.headers, whole)
                    return await send.whole(response, whole)
            pieces = response.pieces()
            while True:
                async with asyncio.timeout(self.timeout):
                    piece = await anext(pieces, None)
                if piece is None:
                    return await send.end()
                await send.piece(response, piece[1])

    async def _metrics(self, scope: Scope, send: Send) -> None:
        """The metrics of all replicas that answer, and the router's own."""
        key = [("authorization", v.decode("latin-1")) for n, v in scope["headers"] if n == b"authorization"]

        async def ask(replica: Replica) -> tuple[int, bytes]:
            try:
                async with asyncio.timeout(self.health_timeout):
                    async with replica.client.request("GET", "/metrics", headers=key) as response:
                        return response.status, await response.read()
            except OSError:
                return 0, b""

        answers = await asyncio.gather(*(ask(replica) for replica in self.replicas if replica.ready))
        if answers and all(status in (401, 403) for status, _ in answers):
            return await _error(send, answers[0][0], "the replicas want another key")
        numbers = [replica.number for replica in self.replicas if replica.ready]
        texts = {n: text.decode() for n, (status, text) in zip(numbers, answers, strict=False) if status == 200}
        body = merged([*texts.items()]) + self.own_metrics()
        await _raw(send, 200, [("content-type", "text/plain; version=0.0.4; charset=utf-8")], body.encode())

    def own_metrics(self) -> str:
        """The router's own metrics in Prometheus' text format."""
        lines, every = [], self.replicas
        for name, kind, what, values in (
            ("replica_ready", "gauge", "Whether a replica gets requests.", [int(r.ready) for r in every]),
            ("requests_under_way", "gauge", "Requests a replica has.", [r.under_way for r in every]),
            ("requests_total", "counter", "Requests a replica answered.", [r.served for r in every]),
            ("failures_total", "counter", "Requests a replica failed.", [r.failed for r in every]),
            ("replica_deaths_total", "counter", "Ends of a replica's process.", [r.deaths for r in every]),
        ):
            lines += [f"# HELP router_{name} {what}", f"# TYPE router_{name} {kind}"]
            lines += [f'router_{name}{{engine="{i}"}} {value}' for i, value in enumerate(values)]
        lines += ["# HELP router_retries_total Requests sent to another replica."]
        lines += ["# TYPE router_retries_total counter"]
        return "\n".join([*lines, f"router_retries_total {self.retries}", ""])


class _Refused(Exception):
    """A replica answered 429 or 503: it is full or not ready."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        super().__init__(status)
        self.status, self.headers, self.body = status, headers, body


class _Gone(Exception):
    """The client disconnected before it had sent the whole body."""


class _Started:
    """The answer to a client. Once its first byte is sent (`begun`), no other replica can answer."""

    def __init__(self, send: Send) -> None:
        self.send, self.begun, self.ended = send, False, False

    async def whole(self, response: Response, body: bytes) -> None:
        self.begun = self.ended = True
        await _raw(self.send, response.status, response.headers, body)

    async def piece(self, response: Response, body: bytes) -> None:
        if not self.begun:
            self.begun = True
            await self.send({"type": "http.response.start", "status": 200, "headers": _headers(response.headers)})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        if not self.begun:
            raise Disconnected("the replica closed an empty stream")
        self.ended = True
        await self.send({"type": "http.response.body", "body": b""})

    async def end_with(self, message: str) -> None:
        """End a stream with an error event; the blank line before it ends an event that was cut off."""
        error = {"error": {"message": message, "type": "server_error", "param": None, "code": 502}}
        event = f"\n\ndata: {json.dumps(error)}\n\n".encode()
        await self.send({"type": "http.response.body", "body": event})


def _is_stream(response: Response) -> bool:
    return response.status == 200 and response.header("content-type").startswith("text/event-stream")


def _headers(pairs: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    kept = (pair for pair in pairs if pair[0] not in HOP_BY_HOP | {"content-length", "date", "server"})
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]


async def _raw(send: Send, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*_headers(headers), length]})
    await send({"type": "http.response.body", "body": body})


async def _answer(send: Send, status: int, content: Mapping[str, Any], headers: Sequence[tuple[str, str]] = ()) -> None:
    await _raw(send, status, [("content-type", "application/json"), *headers], json.dumps(content).encode())


async def _error(send: Send, status: int, message: str, retry_after: int | None = None) -> None:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    await _answer(send, status, {"error": error}, [("retry-after", str(retry_after))] if retry_after else [])


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too long."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


async def _gone(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( .*)")


def merged(texts: Sequence[tuple[int, str]]) -> str:
    """Merge the metrics of replicas: families together, each sample with the label `engine="number"`.

    Args:
        texts: (number of a replica, body of its `/metrics`) pairs.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> (HELP and TYPE, samples)
    for number, text in texts:
        head, samples = families.setdefault("", ([], []))
        for line in text.splitlines():
            if line.startswith("# ") and len(words := line.split(" ", 3)) > 2 and words[1] in ("HELP", "TYPE"):
                head, samples = families.setdefault(words[2], ([], []))
                if not any(known.startswith(f"# {words[1]} ") for known in head):
                    head.append(line)
            elif match := SAMPLE.fullmatch(line):
                labels = re.sub(r'(?:^|,)engine="(?:[^"\\]|\\.)*"', "", match[2] or "").strip(",")
                samples.append(f'{match[1]}{{engine="{number}"{"," * bool(labels)}{labels}}}{match[3]}')
    return "".join("\n".join([*head, *samples]) + "\n" for head, samples in families.values() if samples)
