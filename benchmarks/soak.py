"""64 streams for ten minutes: what a server still holds when it has answered for a long time.

    python -m benchmarks.soak FOLDER                   ten minutes; --seconds 30 to try it

`minimegatron serve` runs in this process, so that its event loop and its engine can be looked at; the clients are
another process. Each of 64 asks, one after the other: streams and whole answers, some with `stop`, every eighth stream
left in the middle. A line every twentieth of the time, after a first one to warm up: requests so far, memory, tasks of
the event loop, threads, open files, Python's objects, pages. At the end, with nobody left, pages and sequences.

Exit status 1: a request failed, or something is left, or memory has grown by 5 % and 16 MiB since the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import psutil

from minimegatron.commands.serve import parse, serve
from minimegatron.serving.app import Server
from minimegatron.serving.http_client import Client
from minimegatron.serving.workload import WORDS

CLIENTS, LINES = 64, 20


async def clients(url: str, seconds: float) -> dict[str, int]:
    """Ask until the time is over; how it went."""
    client, random, until = Client(url), Random(0), time.monotonic() + seconds
    seen = {"answered": 0, "left": 0, "failed": 0}

    async def one(number: int) -> None:
        while time.monotonic() < until:
            number += CLIENTS
            prompt = " ".join(random.choice(WORDS) for _ in range(random.randint(2, 40)))
            body = {"prompt": prompt, "max_tokens": random.randint(8, 64), "stream": random.random() < 0.8}
            body |= {"stop": [random.choice(WORDS)]} if random.random() < 0.25 else {}
            leaves = body["stream"] and random.random() < 0.125
            headers = [("content-type", "application/json")]
            try:
                async with asyncio.timeout(120):
                    raw = json.dumps(body).encode()
                    async with client.request("POST", "/v1/completions", raw, headers) as response:
                        pieces, last = 0, b""
                        async for _, piece in response.pieces():
                            pieces, last = pieces + 1, piece
                            if leaves and pieces == 3:
                                break
                whole = response.status == 200 and (not body["stream"] or b"[DONE]" in last)
                seen["left" if leaves and pieces == 3 else "answered" if whole else "failed"] += 1
            except OSError as error:
                seen["failed"] += 1
                print(f"failed: {error!r}", file=sys.stderr)

    await asyncio.gather(*map(one, range(CLIENTS)))
    return seen


def watch(server: Server, seconds: float, told: dict[str, object]) -> None:
    """Start the clients, look at the server meanwhile, and end it."""
    while not server.started:
        time.sleep(0.05)
    service, process = server.service, psutil.Process()
    port = server.servers[0].sockets[0].getsockname()[1]
    line = [sys.executable, "-m", "benchmarks.soak", "--clients", f"http://127.0.0.1:{port}", "--seconds", str(seconds)]
    began, memory = time.monotonic(), list[int]()
    load = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    blocks = service.engine.scheduler.blocks

    def look() -> str:
        tasks = len(asyncio.all_tasks(server.loop_of_requests))  # type: ignore[attr-defined]
        memory.append(process.memory_info().rss)
        seen = {
            "requests": service.thread._requests,
            "MiB": memory[-1] >> 20,
            "tasks": tasks,
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "objects": len(gc.get_objects()),
            "pages in use": blocks.capacity - blocks.available,
        }
        return f"{time.monotonic() - began:5.0f} s  " + "  ".join(f"{count:6d} {name}" for name, count in seen.items())

    try:
        for i in range(1, LINES + 1):
            time.sleep(max(0.0, began + i * seconds / LINES - time.monotonic()))
            print(look(), flush=True)
        told |= json.loads(load.communicate(timeout=180)[0])
        until = time.monotonic() + 2
        while time.monotonic() < until and (blocks.available < blocks.capacity or service.engine.sequences):
            time.sleep(0.01)
        told["pages left"] = blocks.capacity - blocks.available
        told["sequences left"] = len(service.engine.sequences)
        print(look())
        early = memory[LINES // 4 - 1]
        told["grown"] = memory[-1] > early * 1.05 + (16 << 20)
        print(
            f"memory: {memory[-1] / early:.3f} of what it was after a quarter; CPU-seconds: {sum(os.times()[:2]):.0f}"
        )
    finally:
        load.kill()
        server.handle_exit(15)


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.soak", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", metavar="URL", help="be the clients of a server")
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(asyncio.run(clients(options.clients, options.seconds))))
        return 0
    told: dict[str, object] = {}

    def began(server: Server) -> None:
        startup = server.startup

        async def with_loop(sockets: object = None) -> None:
            server.loop_of_requests = asyncio.get_running_loop()  # type: ignore[attr-defined]
            await startup(sockets)  # type: ignore[arg-type]

        server.startup = with_loop  # type: ignore[method-assign]
        threading.Thread(target=watch, args=(server, options.seconds, told), daemon=True).start()

    serve(parse([str(options.folder), "--port", "0", "--max-num-seqs", str(CLIENTS)]), began)
    print(json.dumps(told))
    return int(bool(told.get("failed") or told.get("pages left") or told.get("sequences left") or told.get("grown")))


if __name__ == "__main__":
    sys.exit(main())
