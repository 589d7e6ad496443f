"""uvicorn's HTTP, with a deadline for the head of a request, and files for many connections.

uvicorn waits for ever for a connection that says nothing, or a line of headers a minute; a few hundred of those and
the server has no descriptors left (the attack called Slowloris). Here a head is there `HEADER_SECONDS` after its
connection was made, or after its first byte on one that is used again; else the connection is closed. Between requests
uvicorn's `timeout_keep_alive` counts, and the body has deadlines of its own (`serving/app`, `serving/router`).
"""

from __future__ import annotations

import asyncio
import contextlib
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
FILES = 1 << 16


def allow_files() -> None:
    """As many open files as the system lets this process have, `FILES` at most.

    A shell's limit is 1,024, and a router has two sockets a request. vLLM: `set_ulimit`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError):  # macOS has a lower limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Http(H11Protocol):
    """A connection, as `http` of `uvicorn.Config`."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
