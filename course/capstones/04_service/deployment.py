"""A learner's deployment: its file, its processes, and requests to it as a stranger sends them.

    deploy.toml --> Deployment.start: one command --> whoever answers on {port}
                                                       +--> replicas: processes below it that serve other ports

Nothing of minimegatron is expected. A **replica** is a process below the command that listens on another port than
{port} does; what it has started itself is part of it. So the processes of `minimegatron serve --data-parallel-size 2`
are found as well as two servers behind an nginx that a shell script starts. Its CPU seconds say how much work it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from labkit.acceptance import read_tables
from labkit.program import Program
from minimegatron.errors import ConfigError
from minimegatron.serving.http_client import Client, Disconnected, ServerSentEvents

START_SECONDS = 180.0
KINDS = ("service", "one_replica", "no_batching")
RATIOS = ("latency", "batching", "replicas")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `deploy.toml` says.

    Attributes:
        start: {kind: command line}.
        promised: p95 of a request's latency among 64, in times of one that is alone.
        predicted, measured: {ratio: number}, of `RATIOS`.
        why: the learner's own words.
        metrics: {"pages", "running", "waiting": name of a metric}.
    """

    start: Mapping[str, str]
    promised: float
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    why: str
    metrics: Mapping[str, str]


METRICS = {
    "pages": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}


def read_plan(path: Path) -> Plan:
    """A `deploy.toml`.

    Raises:
        ConfigError: it is none, or something is missing in it.
    """

    def wrong(what: str, fix: str) -> ConfigError:
        return ConfigError(what, where=str(path), fix=fix)

    tables = read_tables(path, "start", "promise", "predicted", "measured", "report", "metrics")
    start = tables["start"]
    for kind in KINDS:
        if not isinstance(start.get(kind), str):
            raise wrong(f"[start] has no `{kind}`", f'{kind} = "COMMAND"')
    for word in ("{port}", "{deadline}"):
        if word not in start["service"]:
            raise wrong(f"`service` does not use {word}", f"put {word} where the command says it")
    numbers = {
        f"[{table}] {name}": value for table in ("predicted", "measured") for name, value in tables[table].items()
    }
    numbers["[promise] latency"] = tables["promise"].get("latency")
    for name, value in numbers.items():
        if type(value) not in (int, float) or not value > 0:
            raise wrong(f"{name} is {value!r}", "a number above 0")
    metrics = {**METRICS, **tables["metrics"]}
    why = tables["report"].get("why", "")
    return Plan(start, numbers["[promise] latency"], tables["predicted"], tables["measured"], str(why), metrics)


@dataclasses.dataclass
class Answer:
    """What came back for a request.

    Attributes:
        status: 0 without an answer.
        text: of the first choice.
        reason: its `finish_reason`.
        tokens: as `usage` says; 0 where it does not.
        over: a whole answer, or a stream that ended with `[DONE]`.
        error: what was said, or happened, instead.
        begun: a byte of a stream has come.
        seconds: from sending to the end.
        headers, body: of an answer that is no stream.
    """

    status: int = 0
    text: str = ""
    reason: str | None = None
    tokens: int = 0
    over: bool = False
    error: str = ""
    begun: bool = False
    seconds: float = 0.0
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: Any = None

    @property
    def served(self) -> bool:
        """Whether it is a whole answer."""
        return self.status == 200 and self.over and not self.error


class Deployment(Program):
    """A command that is running, and serves.

    Args:
        command: with {checkpoint}, {port}, {deadline} and {python} to be filled in.
        folder: where it runs.
        checkpoint: of the model.
        deadline: seconds that a request may take.
        log: where its output goes.
    """

    def __init__(self, command: str, folder: Path, checkpoint: Path, deadline: float, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = {"checkpoint": checkpoint, "port": self.port, "deadline": f"{deadline:g}"}
        super().__init__(command, folder, words, log)
        self.model = ""
        self.client = Client(f"http://127.0.0.1:{self.port}", connect_timeout=5.0)

    async def ready(self) -> str:
        """Wait until it lists a model; "" when it does, else why not."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if not self.alive:
                return f"its command ended with status {self.process.returncode}: {self.last_words()}"
            try:
                async with asyncio.timeout(5), self.client.request("GET", "/v1/models") as response:
                    said = await response.read()
                if response.status == 200:
                    self.model = str(json.loads(said)["data"][0]["id"])
                    return ""
            except (OSError, ValueError, LookupError, TypeError):
                pass
            await asyncio.sleep(0.1)
        return f"no model on GET /v1/models after {START_SECONDS:.0f} s: {self.last_words()}"

    # ---------------------------------------------------------------------------------------------- processes

    def replicas(self) -> list[psutil.Process]:
        """The outermost processes that listen on other ports than the service's."""
        parents, serving = dict[int, int](), dict[int, psutil.Process]()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                parents[process.pid] = process.ppid()
                listens = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
                if listens and self.port not in listens:
                    serving[process.pid] = process

        def inside(pid: int) -> bool:
            while pid := parents.get(pid, 0):
                if pid in serving:
                    return True
            return False

        return [process for pid, process in sorted(serving.items()) if not inside(pid)]

    def cpu_seconds(self) -> dict[int, float]:
        """{pid of a replica: seconds that it, and what it has started, has computed}."""
        return {replica.pid: _cpu(replica) for replica in self.replicas()}

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    async def stop(self) -> None:
        """End the command, and all that it has started."""
        self.client.close()
        await asyncio.to_thread(self.end)

    # ----------------------------------------------------------------------------------------------- requests

    async def ask(
        self,
        body: Mapping[str, Any] | bytes,
        seconds: float = 120.0,
        leave_after: int = 0,
        answer: Answer | None = None,
    ) -> Answer:
        """Send a completion, and read what comes.

        Args:
            body: fields beside `model`, or the bytes of a body.
            seconds: how long to wait for its end.
            leave_after: pieces of a stream after which the client vanishes.
            answer: is filled, for whoever looks at it meanwhile.
        """
        raw = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        answer, began = answer or Answer(), time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await self._exchange(raw, answer, leave_after)
        except TimeoutError:
            answer.error = f"not over after {seconds:g} s"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            answer.error = str(error) or type(error).__name__
        answer.seconds = time.monotonic() - began
        return answer

    async def _exchange(self, raw: bytes, answer: Answer, leave_after: int) -> None:
        headers = [("content-type", "application/json")]
        async with self.client.request("POST", "/v1/completions", raw, headers) as response:
            answer.status, answer.headers = response.status, dict(response.headers)
            if "text/event-stream" not in response.header("content-type"):
                said = await response.read()
                answer.body = json.loads(said)
                if response.status != 200:
                    answer.error = f"HTTP {response.status}"
                    return
                _add(answer, answer.body)
                answer.over = True
                return
            events, pieces = ServerSentEvents(), 0
            async for _, piece in response.pieces():
                answer.begun = True
                for data in events.feed(piece):
                    if data == "[DONE]":
                        answer.over = True
                    else:
                        _add(answer, json.loads(data))
                pieces += 1
                if pieces == leave_after:
                    return
        if not answer.over and not answer.error:
            raise Disconnected("the stream ended without [DONE]")

    async def metrics(self, name: str) -> float | None:
        """The sum of a metric's samples; None without any."""
        async with asyncio.timeout(10), self.client.request("GET", "/metrics") as response:
            text = (await response.read()).decode()
        samples = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in samples) if samples else None


def _add(answer: Answer, said: Mapping[str, Any]) -> None:
    """An event of a stream, or a whole answer."""
    if said.get("error"):
        answer.error = json.dumps(said["error"])[:200]
    for choice in said.get("choices") or ():
        answer.text += choice.get("text") or ""
        answer.reason = choice.get("finish_reason") or answer.reason
    answer.tokens = (said.get("usage") or {}).get("completion_tokens") or answer.tokens


def _cpu(process: psutil.Process) -> float:
    total = 0.0
    with contextlib.suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system
    return total


@contextlib.asynccontextmanager
async def running(
    command: str, folder: Path, checkpoint: Path, deadline: float, log: Path
) -> AsyncIterator[tuple[Deployment, str]]:
    """(a deployment, "" or why it is not ready); it ends with the block."""
    deployment = Deployment(command, folder, checkpoint, deadline, log)
    try:
        yield deployment, await deployment.ready()
    finally:
        await deployment.stop()
