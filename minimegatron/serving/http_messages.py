"""What HTTP carries: the body of a request, a response or its events, an error with its status, a client's leaving.

| status | when                                                                                              |
|--------|---------------------------------------------------------------------------------------------------|
| 400    | a field is unknown, invalid or not supported; the prompt is too long                              |
| 401    | the key is missing or wrong                                                                       |
| 404    | `model` is another model, or the route does not exist                                             |
| 408    | the body does not arrive in time                                                                  |
| 413    | the body has more than `max_body_bytes`                                                           |
| 415    | Content-Type is not JSON, or the body is compressed. (A foreign web page can send other types     |
|        | without a CORS preflight, JSON it cannot.)                                                        |
| 429    | too many answers are open; `Retry-After` is the mean duration of a request                        |
| 500    | the engine raised                                                                                 |
| 503    | the server shuts down                                                                             |
| 504    | the request took longer than `request_seconds`                                                    |

Errors have OpenAI's form. After a stream has begun an error is an event, and no `[DONE]` follows. **A client that
disconnects** is noticed by its closed connection, not by a failed write, so its request is aborted even while it waits
or its prompt is computed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from minimegatron.errors import ConfigError, DataError, DeadlineError, MinimegatronError
from minimegatron.serving.engine_thread import Full, ShuttingDown
from minimegatron.serving.protocol import ApiError, refuse

T = TypeVar("T")
BODY_SECONDS = 30.0


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request, at most `most` bytes.

    Raises:
        ApiError: 408, 413 or 415.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body has to be of Content-Type application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not read: send it as it is")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise ApiError(413, f"the body has more than {most} bytes", headers={"Connection": "close"})
    except TimeoutError:
        raise ApiError(408, f"the body did not come in {BODY_SECONDS:.0f} s", headers={"Connection": "close"}) from None
    return bytes(body)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response in ASCII: a lone surrogate, which UTF-8 cannot hold, is escaped."""
    return Response(json.dumps(value), status, headers, media_type="application/json")


class Events(StreamingResponse):
    """Server-sent events; calls `leave` after the last one, or when the client disconnects."""

    def __init__(self, content: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if the client disconnects first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None  # no deadline: it is done
    finally:
        for task in tasks:
            task.cancel()


def api_error(error: Exception) -> ApiError:
    """An error in OpenAI's form, with the status of the table above."""
    if isinstance(error, ApiError):
        return error
    text = error.what + (f"; {error.fix}" if error.fix else "") if isinstance(error, MinimegatronError) else str(error)
    if isinstance(error, Full):
        retry = {"Retry-After": str(error.retry_after)}
        return ApiError(429, text, "rate_limit_error", code="rate_limit_exceeded", headers=retry)
    if isinstance(error, ShuttingDown):
        return ApiError(503, text, "service_unavailable_error", headers={"Retry-After": "1"})
    if isinstance(error, DeadlineError):
        return ApiError(504, text, "timeout_error", code="timeout")
    if isinstance(error, ConfigError | DataError):
        return refuse(text)
    return ApiError(500, text or type(error).__name__, "server_error")
