"""`minimegatron bench-serve`: load any OpenAI-compatible server, and measure latencies as its users see them.

    minimegatron bench-serve --request-rate 1 2 4 8 inf --goodput ttft:500 tpot:50 --picture curve.png
    minimegatron bench-serve --max-concurrency 1 8 64 --dataset-path chats.jsonl --endpoint /v1/chat/completions
    minimegatron bench-serve --base-url http://host:8000 --random-input-len 512 --random-prefix-share 0.5

**Open loop** (`--request-rate`): requests arrive at random times, whether or not earlier ones are answered, and latency
counts from the planned arrival. It tells how long users wait at, say, 4 requests a second. **Closed loop**
(`--max-concurrency C` alone): each of C users sends the next request when it has its answer. It tells how much the
server can do. Both flags together: an open loop in which requests above the limit wait, and the wait counts as latency.
Several values of one flag are a sweep, with a run for each.

**Prompts** are random ids of exact lengths, or lines of `--dataset-path`: a text file, or JSON lines with `prompt`,
`messages` or ShareGPT's `conversations`. Every run of a sweep has new prompts, so that none hits the prefix cache of
the run before.

**Read the last line of a run**: if this process used most of a core, or sent requests late, it measured itself. Then
run it on another machine, or at a lower rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.errors import ConfigError, DeadlineError, MinimegatronError
from minimegatron.flags import Parser

if TYPE_CHECKING:
    from minimegatron.serving.http_client import Client
    from minimegatron.serving.load import Record
    from minimegatron.serving.workload import Prompt

BUSY = 0.7  # share of a core above which the generator itself may be the bottleneck
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: an unknown flag or value, or two that contradict each other.
    """
    parser = Parser(
        prog="minimegatron bench-serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("the server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="of the server (default: %(default)s)")
    add("--endpoint", default="/v1/completions", metavar="ROUTE", help="or /v1/chat/completions (default: %(default)s)")
    add("--model", metavar="NAME", help="default: the first that the server lists")
    add("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY, which `ps` does not show")
    add("--ready-timeout", type=float, default=60, metavar="S", help="seconds to wait for the server (default: 60)")
    add("--timeout", type=float, default=600, metavar="S", help="a request that takes longer fails (default: 600)")
    add = parser.add_argument_group("the load").add_argument
    add("--num-prompts", type=int, default=100, metavar="N", help="requests of a run (default: 100)")
    add("--request-rate", type=float, nargs="+", metavar="R", help="a second; inf: all at once (default: inf)")
    add("--burstiness", type=float, default=1, metavar="G", help="of arrivals: 1 Poisson, <1 bursts, >1 more even")
    add("--max-concurrency", type=int, nargs="+", metavar="C", help="most requests under way (default: no limit)")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before the runs, not counted (default: 1)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals; of request i N + i (default: 0)")
    add = parser.add_argument_group("prompts and answers").add_argument
    add("--dataset-path", type=Path, metavar="FILE", help="a prompt a line, or .jsonl (default: random)")
    add("--max-tokens", type=int, metavar="N", help="of an answer, if its line has none (default: 128)")
    add("--random-input-len", type=int, default=256, metavar="N", help="tokens of a prompt (default: 256)")
    add("--random-output-len", type=int, default=64, metavar="N", help="most tokens of an answer (default: 64)")
    add("--random-range-ratio", type=float, default=0, metavar="X", help="both lengths vary by +-X of it (default: 0)")
    add("--random-prefix-share", type=float, default=0, metavar="X", help="of a prompt, the same in all (default: 0)")
    add("--random-ids", type=int, nargs=2, default=(100, 1000), metavar="N", help="first, last + 1 (default: 100 1000)")
    add("--temperature", type=float, default=0, metavar="T", help="default: 0, the most likely token")
    add("--ignore-eos", action="store_true", help="answers of full length, if the server supports ignore_eos")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="other fields of a body: '{\"top_p\": 0.9}'")
    add = parser.add_argument_group("results").add_argument
    goodput = "deadlines in ms that a good request meets: ttft:500 tpot:50 e2el:9000"
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=goodput)
    add("--metric-percentiles", type=float, nargs="+", default=[50, 95, 99], metavar="P", help="default: 50 95 99")
    add("--save-result", type=Path, metavar="FILE", help="as JSON")
    add("--save-detailed", action="store_true", help="... with every request")
    add("--picture", type=Path, metavar="FILE", help="throughput and latency as a picture (.png, .svg, .pdf)")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    for name, least in (("num_prompts", 1), ("num_warmups", 0), ("timeout", 1e-3), ("ready_timeout", 0)):
        value = getattr(args, name)
        if not least <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value}: {least} or more")
    if any(not 0 <= p <= 100 for p in args.metric_percentiles):
        parser.error(f"--metric-percentiles {args.metric_percentiles}: between 0 and 100")
    if not isinstance(args.extra_body, dict):
        parser.error(f"--extra-body is no JSON object: {json.dumps(args.extra_body)[:60]}")
    if any(not rate > 0 for rate in args.request_rate or ()) or any(c < 1 for c in args.max_concurrency or ()):
        parser.error("--request-rate and --max-concurrency are above 0")
    if len(args.request_rate or ()) > 1 and len(args.max_concurrency or ()) > 1:
        parser.error("--request-rate and --max-concurrency both have several values: sweep one of them")
    if args.max_tokens is not None and args.dataset_path is None:
        parser.error("--max-tokens is for --dataset-path; of random prompts it is --random-output-len")
    if args.base_url.rstrip("/").endswith("/v1"):
        parser.error("--base-url ends with /v1, which --endpoint begins with: leave it out")
    if args.save_detailed and not args.save_result:
        parser.error("--save-detailed without --save-result FILE")
    for path in filter(None, (args.save_result, args.picture)):
        if not path.resolve().parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    return args


@dataclasses.dataclass(frozen=True)
class Run:
    """A point of a sweep: requests a second, and most requests under way."""

    rate: float
    concurrency: int | None

    def __str__(self) -> str:
        if math.isinf(self.rate):
            return "all at once" if self.concurrency is None else f"{self.concurrency} at once"
        limit = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        return f"{self.rate:g}/s{limit}"


def runs(args: argparse.Namespace) -> list[Run]:
    """The points of the sweep."""
    rates, limits = args.request_rate or [math.inf], args.max_concurrency or [None]
    return [Run(rate, limit) for rate in rates for limit in limits]


def prompts(args: argparse.Namespace, count: int) -> list[list[Prompt]]:
    """The prompts of each of `count` runs.

    Raises:
        MinimegatronError: an invalid file, or lengths out of range.
    """
    import numpy as np

    from minimegatron.serving.workload import drawn, random_prompts, read

    if args.dataset_path is not None:
        rng = np.random.default_rng(args.seed)
        every = drawn(read(args.dataset_path), args.num_prompts * count, rng)
        return [every[i * args.num_prompts : (i + 1) * args.num_prompts] for i in range(count)]
    return [
        random_prompts(
            args.num_prompts,
            args.random_input_len,
            args.random_output_len,
            np.random.default_rng([args.seed, i]),
            prefix_share=args.random_prefix_share,
            range_ratio=args.random_range_ratio,
            vocab=tuple(args.random_ids),
            text="chat" in args.endpoint,
        )
        for i in range(count)
    ]


async def model_of(client: Client, seconds: float) -> str:
    """The first model that the server lists, once it answers.

    Raises:
        DeadlineError: it does not answer in time.
        ConfigError: it lists no model, or requires a key.
    """
    loop = asyncio.get_running_loop()
    deadline, why = loop.time() + seconds, "no answer yet"
    while True:
        try:
            async with asyncio.timeout(max(deadline - loop.time(), 5)), client.request("GET", "/v1/models") as response:
                said, status = await response.read(), response.status
        except OSError as error:
            why = str(error) or type(error).__name__
        else:
            if status == 200:
                try:
                    return str(json.loads(said)["data"][0]["id"])
                except (ValueError, LookupError, TypeError) as error:
                    raise ConfigError(
                        f"GET /v1/models lists no model: {said[:100]!r}", fix="--model NAME, or another --base-url"
                    ) from error
            if status != 503:
                fix = "--api-key KEY" if status in (401, 403) else "--model NAME, or another --base-url"
                raise ConfigError(f"GET /v1/models answers {status}: {said[:100]!r}", fix=fix)
            why = "it answers 503: not ready"
        if loop.time() >= deadline:
            where = f"http{'s' * client.secure}://{client.host}:{client.port}"
            raise DeadlineError(
                f"the server is not there after {seconds:g} s: {why}", where=where, fix="start it, or --base-url URL"
            )
        await asyncio.sleep(0.5)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the sweep, and print the results of each run.

    Returns:
        The contents of `--save-result`.
    """
    import numpy as np

    from minimegatron.bars import tqdm
    from minimegatron.serving.http_client import Client
    from minimegatron.serving.load import Sender, goodput_deadlines, run, summarise
    from minimegatron.serving.workload import arrivals

    deadlines, sweep = goodput_deadlines(args.goodput), runs(args)
    *every, first = prompts(args, len(sweep) + 1)
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    client = Client(args.base_url, [("authorization", f"Bearer {key}")] if key else [])
    with contextlib.closing(client):
        model = args.model or await model_of(client, args.ready_timeout)
        fields = {"model": model, "temperature": args.temperature, "max_tokens": args.max_tokens or 128}
        fields |= {"ignore_eos": True} if args.ignore_eos else {}
        fields |= args.extra_body
        print(f"{model} at {args.base_url}{args.endpoint}: {args.num_prompts} requests a run")
        if args.num_warmups:
            send = Sender(client, args.endpoint, first, fields, timeout=args.timeout)
            refused(await run(send, [0.0] * min(args.num_warmups, len(first)), max_concurrency=1))
        results = []
        for i, (point, own) in enumerate(zip(sweep, every, strict=True)):
            send = Sender(client, args.endpoint, own, fields, seed=args.seed, timeout=args.timeout)
            times = arrivals(len(own), point.rate, np.random.default_rng([args.seed, i, 1]), args.burstiness)
            gc.collect()
            wall, cpu = time.monotonic(), time.process_time()
            off = True if args.disable_tqdm else None
            with tqdm(total=len(own), desc=str(point), unit="request", leave=False, disable=off) as bar:
                records = await run(send, times, point.concurrency, lambda record, bar=bar: bar.update())  # type: ignore[misc]
            share = (time.process_time() - cpu) / (time.monotonic() - wall)
            summary = summarise(records, deadlines, sorted({50, 99, *args.metric_percentiles}))
            rate = None if math.isinf(point.rate) else point.rate
            summary |= {"request_rate": rate, "max_concurrency": point.concurrency, "generator_cpu_share": share}
            print("\n".join(in_words(point, summary, args)), flush=True)
            if args.save_detailed:
                summary["requests"] = [dataclasses.asdict(record) for record in records]
            results.append(summary)
    flags = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items() if name != "api_key"}
    flags["request_rate"] = [str(rate) for rate in args.request_rate or ["inf"]]  # JSON knows no infinity
    return {"model": model, "date": time.strftime("%Y-%m-%d %H:%M:%S"), "flags": flags, "runs": results}


def refused(warm: Sequence[Record]) -> None:
    """Stop before the load if no warm-up request was answered.

    Raises:
        ConfigError: the server refused it (HTTP 4xx).
        MinimegatronError: it failed otherwise.
    """
    if not all(record.error for record in warm):
        return
    error, detail = warm[0].error, warm[0].detail
    kind = ConfigError if error.startswith("HTTP 4") else MinimegatronError
    raise kind(f"the first request failed ({error}): {detail}", fix="see --help for --endpoint, --model, --random-ids")


def in_words(point: Run, summary: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """The results of a run, as lines."""
    s, total = summary, summary["completed"] + summary["failed"]
    lines = [f"\n{point}: {s['completed']} of {total} answered in {s['duration']:.2f} s, {s['max_concurrent']} at once"]
    if s["completed"]:
        counted = f" ({s['counted_by_pieces']} counted by pieces: no usage)" if s["counted_by_pieces"] else ""
        lines.append(
            f"  a second: {s['request_throughput']:.3g} requests, {s['output_throughput']:.4g} output tokens{counted},"
            f" {s['total_token_throughput']:.4g} tokens in all"
        )
        columns = ["mean", *(f"p{p:g}" for p in args.metric_percentiles)]
        lines.append(f"  {'ms':<6}" + "".join(f"{name:>10}" for name in columns))
        for metric, title in TITLES.items():
            values = [s[f"{name}_{metric}_ms"] for name in columns]
            lines.append(f"  {title:<6}" + "".join(f"{'-':>10}" if v is None else f"{v:>10.1f}" for v in values))
        if args.goodput:
            share = f"{s['request_goodput']:.3g} requests a second, {s['goodput_share']:.0%} of all"
            lines.append(f"  goodput ({' '.join(args.goodput)}): {share}")
    for kind, told in sorted(s["errors"].items()):
        lines.append(f"  failed: {told['count']} x {kind}; the first: {' '.join(told['first'].split())[:160]}")
    busy, late = s["generator_cpu_share"], s["p99_late_ms"]
    waits = "" if point.concurrency else f", and sent 99 % of the requests within {late:.1f} ms of their time"
    lines.append(f"  this generator used {busy:.0%} of a core{waits}")
    if busy > BUSY:
        lines.append("  warning: so busy, it may have measured itself: use another machine, or a lower rate")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write.

    Returns:
        0, or 1 if no request was answered.

    Raises:
        MinimegatronError: invalid flags or prompts, or a server that does not answer.
    """
    args = parse(argv)
    if args.picture:
        try:
            from minimegatron.viz.load import throughput_latency
        except ImportError as error:
            raise ConfigError("a picture needs matplotlib", fix="pip install 'minimegatron[lab]'") from error
    try:
        import minimegatron.serving.http_client  # noqa: F401  its one dependency
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", fix="pip install 'minimegatron[serve]'") from error
    result = asyncio.run(measure(args))
    if args.save_result:
        args.save_result.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten: {args.save_result}", file=sys.stderr)
    answered = any(summary["completed"] for summary in result["runs"])
    if args.picture and answered:
        from minimegatron.serving.load import goodput_deadlines

        points = [(str(point), s) for point, s in zip(runs(args), result["runs"], strict=True)]
        title = f"{result['model']}: {args.num_prompts} requests a run"
        throughput_latency(points, goodput_deadlines(args.goodput), title).savefig(args.picture)
        print(f"written: {args.picture}", file=sys.stderr)
    return 0 if answered else 1
