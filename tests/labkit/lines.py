"""Ranks for the tests of the transport: forked from one process that has imported torch, with a broker or with gloo.

python -m tests.labkit.lines        reads orders from standard input, one JSON a line, and answers likewise
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from labkit.channel import Line

from labkit import broker, transport, transport_group

_DEADLINE = 120  # seconds


class Ranks:
    """The process that forks; `run` asks it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.labkit.lines"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, function: str, world: int, over: str = "broker", most_held: int = transport.MAX_HELD, **inputs: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """What `function(rank, world, **inputs)` returned on each rank, or the text of its error; and the evidence."""
        assert self._process.stdin and self._process.stdout
        order = {"function": function, "world": world, "over": over, "most_held": most_held, "inputs": inputs}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return [torch.load(io.BytesIO(base64.b64decode(one)), weights_only=False) for one in answer["values"]], answer[
            "evidence"
        ]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(20)


def _serve() -> None:
    """Answer orders until there are no more."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_played(json.loads(line), Path(folder))), flush=True)


def _played(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    world = order["world"]
    pairs = [socket.socketpair() for _ in range(world)]
    near, far = socket.socketpair()
    pids = [_forked(order, rank, pairs, folder) for rank in range(world)]
    for mine, _ in pairs:
        mine.close()
    found: dict[str, Any] = {}
    transport.MAX_HELD = order["most_held"]
    lines, services = [theirs for _, theirs in pairs], {"transport": transport.Transport(world)}
    thread = threading.Thread(target=lambda: found.update(broker.serve(lines, far, services)))
    thread.start()
    for pid in pids:
        os.waitpid(pid, 0)
    near.close()
    thread.join(20)
    for theirs in lines:
        theirs.close()
    far.close()
    files = [folder / f"value.{rank}" for rank in range(world)]
    values = [base64.b64encode(file.read_bytes()).decode() for file in files if file.exists()]
    return {"values": values, "evidence": found["transport"]}


def _forked(order: dict[str, Any], rank: int, pairs: list[Any], folder: Path) -> int:
    if (pid := os.fork()) != 0:
        return pid
    for other, (mine, theirs) in enumerate(pairs):
        theirs.close()
        if other != rank:
            mine.close()
    signal.alarm(_DEADLINE)
    value: Any = None
    try:
        value = _life(order, rank, pairs[rank][0], folder)
    except BaseException as error:
        value = f"{type(error).__name__}: {error}"
        if not isinstance(error, RuntimeError | ValueError):
            value = traceback.format_exc()
    finally:
        torch.save(value, folder / f"value.{rank}")
        sys.stdout.flush()
        os._exit(0)


def _life(order: dict[str, Any], rank: int, mine: socket.socket, folder: Path) -> Any:
    world = order["world"]
    if order["over"] == "gloo":
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
                                timeout=timedelta(seconds=20))  # fmt: skip
    else:
        transport_group.connect(Line(mine), rank, world)
    module, _, name = order["function"].partition(":")
    value = getattr(importlib.import_module(module), name)(rank, world, **order["inputs"])
    if order["over"] == "gloo":
        dist.barrier()
    transport_group.finish()
    return value


if __name__ == "__main__":
    _serve()
