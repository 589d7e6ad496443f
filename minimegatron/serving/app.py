"""The HTTP server: routes, API key, shutdown.

| route                       | answers                                                             | without a key |
|-----------------------------|---------------------------------------------------------------------|---------------|
| `POST /v1/completions`      | the continuation of a text                                          | 401           |
| `POST /v1/chat/completions` | the next message of a conversation                                  | 401           |
| `GET /v1/models`            | names of the model and its adapters, `max_model_len`                | 401           |
| `GET /metrics`              | Prometheus metrics                                                  | 401           |
| `GET /health`               | 200 if a request would be served, else 503                          | answers       |
| `GET /`                     | the chat page, which asks for the key                               | answers       |

`serving/service` answers the requests, `serving/http_messages` has the statuses of errors.

**Shutdown.** After the first SIGTERM or SIGINT, new requests get 503 and open ones may finish within `drain_seconds`;
after a second signal the server ends at once.

Prompts, answers and keys are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from minimegatron.errors import ConfigError, MinimegatronError, RankError
from minimegatron.serving.engine_thread import ShuttingDown
from minimegatron.serving.http_messages import api_error, json_response
from minimegatron.serving.http_server import Http, allow_files
from minimegatron.serving.protocol import ApiError
from minimegatron.serving.service import Service

WITHOUT_KEY = ("/", "/health")
PAGE = Path(__file__).with_name("chat.html")


class Guard:
    """ASGI middleware: checks the key before any route is looked up, and refuses new requests during shutdown.

    Args:
        app: the application.
        service: has the key, and knows of the shutdown.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        key = service.config.api_key
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await json_response(error.body, error.status, error.headers)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._wanted is not None and scope["path"] not in WITHOUT_KEY:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                what = "no API key, or a wrong one: `Authorization: Bearer KEY`"
                headers = {"WWW-Authenticate": "Bearer"}
                return ApiError(401, what, "authentication_error", code="invalid_api_key", headers=headers)
        if self.service.draining and scope["method"] == "POST":
            return api_error(ShuttingDown("the server is shutting down", fix="ask another server, or this one later"))
        return None


def create_app(service: Service) -> FastAPI:
    """The FastAPI application of a service; starts and ends the service's threads."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_middleware(Guard, service=service)

    async def answer_error(_: Request, error: Exception) -> Response:
        said = api_error(error)
        return json_response(said.body, said.status, said.headers)

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for it"
        said = ApiError(error.status_code, str(error.detail))
        return json_response(said.body, said.status, dict(error.headers or {}))

    for kind in (ApiError, MinimegatronError, Exception):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(HTTPException, http_error)

    app.add_api_route("/v1/completions", service.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], response_model=None)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.model(name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(service.model(name))

    @app.get("/health")
    async def health() -> Response:
        return service.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def page() -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    return app


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it ends and exits with status 0 after a signal.

    Args:
        service: the handlers.
        host, port: address; port 0: any free port.
    """

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 8000) -> None:
        config = uvicorn.Config(
            create_app(service),
            host=host,
            port=port,
            http=Http,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)
        self.service, self.name = service, service.config.served_model_name
        self._until: float | None = None

    def run_until_signal(self) -> None:
        """Serve until a signal; called in the main thread.

        Raises:
            ConfigError: the port is taken or not permitted.
            RankError: the engine failed.
        """
        config = self.config
        allow_files()
        try:
            family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
            listener = socket.create_server((config.host, config.port), family=family, backlog=config.backlog)
            # Connections inherit the option; asyncio sets it only for sockets with an explicit protocol. Without it a
            # token waits up to 40 ms for the client's delayed acknowledgement of the one before.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}", fix="another --port") from None
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"{self.name} answers on the page http://{shown}:{port}/", file=sys.stderr)
        print(f"and OpenAI's clients at base_url http://{shown}:{port}/v1", file=sys.stderr, flush=True)
        try:
            self.run(sockets=[listener])
        finally:
            listener.close()
            if self.started:
                self.service.close()
        if (failure := self.service.thread.failure) is not None:
            raise RankError(f"the engine has ended: {type(failure).__name__}: {failure}") from failure

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """First signal: drain; second signal: end at once."""
        if self.service.draining:
            self.should_exit = self.force_exit = True
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: whether to end now."""
        service = self.service
        if service.thread.failure is not None:
            self.should_exit = True
        elif service.draining:
            now = time.monotonic()
            self._until = self._until or now + service.config.drain_seconds
            if now > self._until:
                service.thread.end()
            self.should_exit = self.should_exit or service.thread.idle or now > self._until
        return await super().on_tick(counter)
