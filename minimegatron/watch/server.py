"""The HTTP server of `minimegatron watch`: files of the page, and JSON about runs. It reads, and never writes.

| path                     | answer                                                                                   |
|--------------------------|------------------------------------------------------------------------------------------|
| `/`, `/page.css`, `/*.js` | the page                                                                                |
| `/api/runs`              | names of the runs                                                                        |
| `/api/run/K?...`         | what is new in run K: its state, curves from `since` on, lines after number `lines`      |
| `/api/run/K/layers/KIND` | norms by layer: of `gradient`, `weights`, `update`                                        |
| `/api/run/K/timeline`    | the last timeline                                                                        |
| `/api/run/K/config`      | the whole configuration                                                                  |

It listens on 127.0.0.1 alone, and answers only requests whose `Host` is this machine, so that a page of the web cannot
read it through a name of its own that points here (DNS rebinding). The page may load nothing from elsewhere
(Content-Security-Policy). Nothing is computed while nobody asks. To watch a run of another machine, start `watch`
there and forward its port: `ssh -N -L 7070:127.0.0.1:7070 HOST`.
"""

from __future__ import annotations

import errno
import json
import math
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from minimegatron.errors import ConfigError, MinimegatronError, require
from minimegatron.watch.log import LAYERS, RunLog
from minimegatron.watch.predicted import Predictor

FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
FILES |= {f"/{name}": (name, "text/javascript") for name in ("page.js", "curves.js", "panels.js")}
HOSTS = ("127.0.0.1", "localhost", "[::1]")
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
SHOWN = ("memory", "stragglers", "validation", "test", "end")  # events whose last object the page gets


class Watched:
    """The runs of a page.

    Args:
        logs: one or two.
        predictor: None predicts nothing.
    """

    def __init__(self, logs: list[RunLog], predictor: Predictor | None = None) -> None:
        self.logs, self.predictor = logs, predictor
        self._reading = [threading.Lock() for _ in logs]
        for number in range(len(logs)):
            threading.Thread(target=self._catch_up, args=(number,), daemon=True).start()

    def _catch_up(self, number: int) -> None:
        """Read what is there already, a moment at a time, so that a page need not wait for all of it."""
        log, behind = self.logs[number], True
        while behind:
            with self._reading[number]:
                try:
                    log.read(0.1)
                except MinimegatronError:  # whoever asks is told
                    return
                behind = log.behind
            time.sleep(0.002)

    def answer(self, path: str, asked: dict[str, int]) -> Any:
        """The JSON of a path; None if there is no such path.

        Raises:
            MinimegatronError: a log cannot be read, or a number makes no sense.
        """
        words = path.strip("/").split("/")
        if words == ["api", "runs"]:
            return [str(log.path) for log in self.logs]
        if words[:2] != ["api", "run"] or len(words) < 3 or words[2] not in map(str, range(len(self.logs))):
            return None
        number = int(words[2])
        with self._reading[number]:
            log = self.logs[number]
            if words[3:] == []:
                log.read(0.05)
                return self._news(log, asked)
            if words[3:4] == ["layers"] and words[4:] in ([kind] for kind in LAYERS):
                return log.layers(words[4], first=asked.get("first", 0), end=asked.get("end", 0))
            if words[3:] == ["timeline"]:
                return log.latest.get("timeline", {})
            return log.config if words[3:] == ["config"] else None

    def _news(self, log: RunLog, asked: dict[str, int]) -> dict[str, Any]:
        known = asked.get("generation") == log.generation
        points, first, end = asked.get("points", 500), asked.get("first", 0), asked.get("end", 0)
        require(1 <= points <= 5000, f"points={points}", "1 to 5000")
        since, width = (asked.get("since", 0), asked.get("width", 0)) if known else (0, 0)
        curves = log.curves(since, width, points, first, end, min(asked.get("smooth", 0), 1 << 30))
        config = log.config
        latest = {name: log.latest[name] for name in SHOWN if name in log.latest}
        if "train" in log.latest:
            latest["train"] = {k: v for k, v in log.latest["train"].items() if k != "norms"}
        timeline = log.latest.get("timeline")
        return {
            "generation": log.generation,
            "read": [log.unread, log.size],
            "iteration": log.iteration,
            "train_iters": latest.get("train", {}).get("train_iters") or config.get("machine", {}).get("train_iters"),
            "age": max(0.0, time.time() - log.changed),
            "ended": log.ended,
            "broken": log.broken,
            "not_finite": log.not_finite,
            "marks": log.marks,
            "latest": latest,
            "timeline": timeline and timeline.get("iteration"),
            "machine": config.get("machine", {}),
            "run": {name: config.get(name) for name in ("parallel", "data", "training", "optimizer")}
            if not known
            else None,
            "model": config.get("model") if not known else None,
            "predicted": self.predictor.of(config) if self.predictor and config else None,
            "lines": log.lines(asked.get("lines", 0) if known else 0),
            **curves,
        }


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version, timeout = "HTTP/1.1", 60.0
    disable_nagle_algorithm, wbufsize = True, 1 << 16  # an answer leaves as a whole, and at once
    server: Server

    def do_GET(self) -> None:
        try:
            self._answer()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_GET

    def _answer(self) -> None:
        host = self.headers.get("Host", "")
        if (host.rpartition(":")[0] or host) not in HOSTS and host not in HOSTS:
            return self._send(HTTPStatus.FORBIDDEN, b"this page is for this machine alone\n", "text/plain")
        address = urlsplit(self.path)
        if address.path in FILES:
            name, kind = FILES[address.path]
            body = resources.files(__package__).joinpath(name).read_bytes()
            return self._send(HTTPStatus.OK, body, kind)
        try:
            asked = {name: int(values[-1]) for name, values in parse_qs(address.query).items()}
            found = self.server.watched.answer(address.path, asked)
            status = HTTPStatus.OK if found is not None else HTTPStatus.NOT_FOUND
        except ValueError as error:
            found, status = {"error": str(error)}, HTTPStatus.BAD_REQUEST
        except MinimegatronError as error:
            found, status = {"error": str(error)}, HTTPStatus.CONFLICT
        self._send(status, as_json(found).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line a request is of no use."""


def as_json(value: Any) -> str:
    """JSON as browsers read it: without NaN and infinity, which Python writes and reads."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Server(ThreadingHTTPServer):
    """The server.

    Args:
        watched: the runs.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or not allowed.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched = watched
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            what = "is taken by another program" if taken else f"cannot be used: {error}"
            raise ConfigError(f"port {port} {what}", fix="--port N, or --port 0 for one that is free") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"
