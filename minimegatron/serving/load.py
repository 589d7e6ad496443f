"""A load generator for OpenAI-compatible servers, and latencies as users see them.

    planned  ...waits for its turn...  sent  ...server...  first token  token  token  ...  done
    |<----------------------- TTFT ----------------------->|<-- ITL --->|
    |<--------------------------------------- E2E ---------------------------------------->|

| loop   | a request is sent                    | its latency starts at  | question answered                    |
|--------|--------------------------------------|------------------------|--------------------------------------|
| open   | at its planned arrival               | its planned arrival    | how long do users wait at this rate? |
| closed | when one of C users has an answer    | its sending            | how much can the server do?          |

**Coordinated omission**: a generator that waits for a slow server before it sends the next request leaves out exactly
the times at which users would have waited longest (G. Tene, "How NOT to measure latency", 2013). Here an open loop
never waits for an answer. If `max_concurrency` or the generator itself sends a request late, the delay counts as
latency.

| metric          | definition                                                                                       |
|-----------------|--------------------------------------------------------------------------------------------------|
| TTFT            | start to first token                                                                             |
| TPOT            | (E2E - TTFT) / (tokens - 1); undefined for a single token                                        |
| ITL             | gaps between pieces with text, pooled over all requests; a piece may hold several tokens         |
| E2E             | start to end of the answer                                                                       |
| goodput         | requests a second that met every deadline; failed requests met none                              |

Rates are over the time from the first start to the last end. Names and definitions are those of `vllm bench serve`,
except that in vLLM's open loop latency starts when the request is sent.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minimegatron.errors import ConfigError, require
from minimegatron.serving.http_client import BadResponse, Client, Disconnected, ServerSentEvents
from minimegatron.serving.workload import Prompt

ROUTES = ("/v1/completions", "/v1/chat/completions")
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 95, 99)


@dataclasses.dataclass
class Record:
    """The times of a request, in seconds of the event loop's clock.

    Attributes:
        begun: start of its latency.
        sent: when its sending began, connecting included.
        tokens_at: when each piece with text arrived.
        done: when the answer ended or failed.
        prompt_tokens, output_tokens: as reported by the server (`usage`).
        counted: the server reported no usage; `output_tokens` is the number of pieces.
        error: kind of failure; "" if it succeeded.
        detail: message of the failure.
    """

    begun: float
    sent: float = math.nan
    tokens_at: list[float] = dataclasses.field(default_factory=list)
    done: float = math.nan
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    error: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.tokens_at[0] - self.begun

    @property
    def e2el(self) -> float:
        """End-to-end latency, seconds."""
        return self.done - self.begun

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None for a single token."""
        return (self.done - self.tokens_at[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: seconds between pieces."""
        return np.diff(self.tokens_at).tolist()


Send = Callable[[int, Record], Awaitable[None]]


async def run(
    send: Send,
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Send every request, and wait for all answers; `send` enforces the deadline of each.

    Args:
        send: (number of the request, its record): sends it, reads the answer and fills the record. An exception is a
            defect, and ends the run.
        arrivals: planned arrival of each request, in seconds from now. With `max_concurrency` and all arrivals 0 the
            loop is closed: a request starts when an earlier one ends.
        max_concurrency: most requests under way at once; the others wait.
        on_done: called with each completed record.

    Returns:
        A record for each request.
    """
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency or max(len(arrivals), 1))
    closed, start = max_concurrency is not None and not any(arrivals), loop.time()

    async def one(number: int, record: Record) -> None:
        async with places:
            if closed:
                record.begun = loop.time()
            await send(number, record)
        on_done(record)

    records = [Record(start + offset) for offset in arrivals]
    async with asyncio.TaskGroup() as group:
        for number, record in enumerate(records):
            if (wait := record.begun - loop.time()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(number, record))
    return records


class Sender:
    """Sends prompts as streamed requests to one server.

    Args:
        client: connected to the server.
        route: one of `ROUTES`.
        prompts: prompt i is request i.
        fields: of every body, such as model and temperature; `max_tokens` applies where a prompt has none.
        seed: request i has seed + i.
        timeout: most seconds from sending to the end of the answer.

    Raises:
        ConfigError: another route, or prompts of ids for a chat.
    """

    def __init__(
        self,
        client: Client,
        route: str,
        prompts: Sequence[Prompt],
        fields: Mapping[str, Any],
        *,
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        if route not in ROUTES:
            raise ConfigError(f"there is no route {route} here", fix=" or ".join(ROUTES))
        self.client, self.route, self.timeout = client, route, timeout
        chat = route == ROUTES[1]
        fixed = {"stream": True, "stream_options": {"include_usage": True}}
        self.bodies = [
            json.dumps(
                {
                    **fixed,
                    "seed": seed + i,
                    **fields,
                    **({} if prompt.max_tokens is None else {"max_tokens": prompt.max_tokens}),
                    **(prompt.chat() if chat else prompt.completion()),
                }
            ).encode()
            for i, prompt in enumerate(prompts)
        ]  # before anything is timed

    async def __call__(self, number: int, record: Record) -> None:
        loop = asyncio.get_running_loop()
        record.sent = loop.time()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                await self._exchange(self.bodies[number], record)
        except TimeoutError:
            record.error = "deadline" if limit.expired() else "connect"
            record.detail = f"after {loop.time() - record.sent:.1f} s"
        except Disconnected as error:
            record.error, record.detail = "disconnected", str(error)
        except (BadResponse, ValueError, KeyError, TypeError, AttributeError) as error:
            record.error, record.detail = "malformed", f"{type(error).__name__}: {error}"
        except OSError as error:
            record.error, record.detail = "connect", str(error)
        if record.error or math.isnan(record.done):
            record.done = loop.time()

    async def _exchange(self, body: bytes, record: Record) -> None:
        async with self.client.request("POST", self.route, body, [("content-type", "application/json")]) as response:
            if response.status != 200:
                said = await response.read()
                record.error, record.detail = f"HTTP {response.status}", said[:300].decode(errors="replace")
                return
            if "text/event-stream" not in response.header("content-type"):
                raise BadResponse(f"content-type is {response.header('content-type')!r}, not text/event-stream")
            events, over = ServerSentEvents(), False
            async for when, piece in response.pieces():
                for data in events.feed(piece):
                    over = over or data == "[DONE]"
                    if not over:
                        _event(json.loads(data), when, record)
                record.done = when
            if record.error:
                return
            if not over:
                record.error, record.detail = "no [DONE]", "the stream was closed without it"
            elif not record.tokens_at:
                record.error, record.detail = "empty", "a stream without a token"
        if not record.output_tokens:
            record.counted, record.output_tokens = True, len(record.tokens_at)


def _event(event: dict[str, Any], when: float, record: Record) -> None:
    """Note an event of a stream in the record: text, usage, or an error."""
    if event.get("error"):
        record.error, record.detail = "error in the stream", json.dumps(event["error"])[:300]
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice
        text = said.get("text") or said.get("content") or said.get("reasoning_content") or said.get("tool_calls")
        if text or (choice.get("finish_reason") and not record.tokens_at):  # e.g. the first token ended it
            record.tokens_at.append(when)
            break
    if usage := event.get("usage"):
        record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def goodput_deadlines(words: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]`, in milliseconds as for vLLM -> {metric: seconds}.

    Raises:
        ConfigError: not NAME:MILLISECONDS, or another metric than ttft, tpot and e2el.
    """
    found = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            found[name] = float(number) / 1000
        except ValueError:
            found[name] = -1.0
        allowed = name in ("ttft", "tpot", "e2el") and 0 < found[name] < math.inf
        require(allowed, f"--goodput {word}", "ttft:MS, tpot:MS or e2el:MS, e.g. ttft:500 tpot:50")
    return found


def summarise(
    records: Sequence[Record],
    deadlines: Mapping[str, float] = {},
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """The statistics of a run, a pure function of its records.

    Args:
        records: of all its requests.
        deadlines: of goodput, metric -> seconds.
        percentiles: of each metric, linearly interpolated.

    Returns:
        The keys of `vllm bench serve`: duration (s), completed, failed, request_throughput, output_throughput,
        total_token_throughput (all a second), request_goodput with deadlines, and for each metric
        `{mean,std,p50,...}_{ttft,tpot,itl,e2el}_ms`. Besides: errors (kind -> count, first detail), counted_by_pieces
        (requests without usage), max_concurrent, goodput_share, and `p99_late_ms`, `max_late_ms`: how long after its
        start a request was sent. A metric without a value is None.
    """
    good = [record for record in records if not record.error]
    duration = max((r.done for r in records), default=0.0) - min((r.begun for r in records), default=0.0)
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)

    def rate(count: float) -> float | None:
        return count / duration if duration > 0 else None

    errors: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error:
            errors.setdefault(record.error, {"count": 0, "first": record.detail})["count"] += 1
    late = [(r.sent - r.begun) * 1000 for r in records]
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": errors,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "counted_by_pieces": sum(r.counted for r in good),
        "request_throughput": rate(len(good)),
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        "max_concurrent": _most_at_once(records),
        "p99_late_ms": float(np.percentile(late, 99)) if late else None,
        "max_late_ms": max(late, default=None),
    }
    if deadlines:
        met = sum(all((getattr(r, name) or 0.0) <= limit for name, limit in deadlines.items()) for r in good)
        summary["request_goodput"] = rate(met)
        summary["goodput_share"] = met / len(records) if records else None
    values = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.tpot is not None],
        "itl": [gap for r in good for gap in r.itl],
        "e2el": [r.e2el for r in good],
    }
    for name in METRICS:
        ms = np.array(values[name]) * 1000
        summary[f"mean_{name}_ms"] = float(ms.mean()) if ms.size else None
        summary[f"std_{name}_ms"] = float(ms.std()) if ms.size else None
        for percentile in percentiles:
            summary[f"p{percentile:g}_{name}_ms"] = float(np.percentile(ms, percentile)) if ms.size else None
    return summary


def _most_at_once(records: Sequence[Record]) -> int:
    """Most requests under way at the same time; one that ends as another is sent does not count."""
    changes = collections.Counter[float]()
    for record in records:
        changes[record.sent] += 1
        changes[record.done] -= 1
    under_way = np.cumsum([changes[when] for when in sorted(changes)])
    return int(under_way.max(initial=0))
