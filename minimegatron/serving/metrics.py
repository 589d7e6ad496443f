"""Prometheus metrics under vLLM's names, so a dashboard for vLLM shows this server too.

| metrics                                    | kind      | source                                                     |
|--------------------------------------------|-----------|------------------------------------------------------------|
| running and waiting sequences, pages       | gauge     | the scheduler, read at each scrape                         |
| tokens, prefix cache hits, preemptions     | counter   | the engine's counters, read at each scrape                 |
| proposed and accepted tokens               | counter   | the same; accepted ones also by position in the draft      |
| latencies and lengths of requests          | histogram | events of the engine thread                                |

Each metric has the label `model_name`. vLLM: `docs/usage/metrics.md`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minimegatron.inference.engine import Engine
from minimegatron.serving.engine_thread import Stream

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LENGTHS = tuple(1 << i for i in range(18))


class Metrics:
    """The metrics of one engine.

    Args:
        engine: has the counters.
        model_name: value of the label.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine, self._name = engine, model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._next = histogram("inter_token_latency_seconds", "From a token to the next.", SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self._answer = histogram("request_generation_tokens", "Tokens of all answers of a request.", LENGTHS)
        self._each = histogram("request_time_per_output_token_seconds", "Mean of a request's tokens.", SECONDS)
        self._over = Counter(
            "vllm:request_success",
            "Requests that are over, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._read: dict[str, int] = {"prompt": 0}
        self.registry.register(_Reader(self))  # type: ignore[arg-type]

    def observe(self, event: str, stream: Stream, *values: Any) -> None:
        """Record an event of `EngineThread`.

        Args:
            event: "first_token" or "next_token" (value: seconds), "finished" (values: reason, time of the first token).
            stream: of the request.
            values: of the event.
        """
        if event == "first_token":
            self._first.observe(values[0])
            self._read["prompt"] += len(stream.request.prompt)
        elif event == "next_token":
            self._next.observe(values[0])
        else:
            reason, first = values
            now, made = time.monotonic(), stream.made
            self._over.labels(self._name, reason).inc()
            self._whole.observe(now - stream.submitted)
            self._prompt.observe(len(stream.request.prompt))
            self._answer.observe(made)
            if first is not None and made > 1:
                self._each.observe((now - first) / (made / stream.request.n))

    def text(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters that are read from the engine at each scrape."""
        engine, label = self._engine, ["model_name"]
        scheduler, blocks = engine.scheduler, engine.scheduler.blocks
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens, by their place among those proposed together.",
            labels=[*label, "position"],
        )
        for i, count in enumerate(engine.accepted_at):
            positions.add_metric([self._name, str(i)], count)
        yield positions
        used = 1.0 - blocks.available / blocks.capacity
        for name, text, value in (
            ("num_requests_running", "Sequences that run.", len(scheduler.running)),
            ("num_requests_waiting", "Sequences that wait.", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of pages in use; 1 is all.", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=label)
            gauge.add_metric([self._name], value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that were read.", self._read["prompt"]),
            ("generation_tokens", "Tokens that were drawn.", engine.drawn_tokens),
            ("num_preemptions", "Sequences that lost their pages.", scheduler.preemptions),
            ("prefix_cache_queries", "Tokens of prompts that were looked for in pages.", blocks.asked),
            ("prefix_cache_hits", "Those that were found.", blocks.hits),
            ("spec_decode_num_drafts", "Times that tokens were proposed to a sequence.", engine.drafts),
            ("spec_decode_num_draft_tokens", "Tokens that were proposed.", engine.proposed_tokens),
            ("spec_decode_num_accepted_tokens", "Those that were accepted.", engine.accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=label)
            counter.add_metric([self._name], value)
            yield counter


class _Reader:
    """prometheus_client's collector interface."""

    def __init__(self, metrics: Metrics) -> None:
        self.collect = metrics.collect
