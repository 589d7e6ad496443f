"""uvicorn's HTTP protocol with a deadline for the headers of a request, and a higher limit of open files.

uvicorn waits for ever for a connection that sends nothing, or one header line a minute; a few hundred of these use up
the server's file descriptors (the Slowloris attack). Here the headers must be complete `HEADER_SECONDS` after the
connection was made, or on a reused connection after their first byte; otherwise the connection is closed. Between
requests uvicorn's `timeout_keep_alive` applies, and bodies have their own deadlines (`serving/http_messages`,
`serving/router`).
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
    """Raise this process's limit of open files to what the system allows, at most `FILES`.

    A shell's limit is 1,024, and a router needs two sockets a request. vLLM: `set_ulimit`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError):  # macOS has a lower limit than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Http(H11Protocol):
    """A connection; the class is given to `uvicorn.Config(http=...)`."""

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
