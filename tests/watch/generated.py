"""Logs as a training writes them, without training: any number of steps, ranks, layers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minimegatron.training.arguments import parse_args

FLAGS = "--preset laptop-10m --mock-data --seq-length 256 --global-batch-size 8 --micro-batch-size 1 --lr 1e-3"
BEGAN = 1.7e9


def config(flags: str = "", world: int = 1, train_iters: int = 100_000, device: str = "cpu") -> dict[str, Any]:
    machine = {"world_size": world, "device": device, "device_name": "", "peak_tflops": None}
    machine |= {"train_iters": train_iters, "time": BEGAN}
    flags = f"{FLAGS} --global-batch-size {max(8, world)} {flags}"
    return {"event": "config", "machine": machine, **parse_args(flags.split(), world).to_dict()}


def step(i: int, noise: random.Random, train_iters: int = 100_000, lr: float = 1e-3) -> dict[str, Any]:
    """A step of a run whose loss falls; numbers differ from step to step."""
    loss = 2.2 + 6.8 * math.exp(-i / (train_iters / 8)) + noise.gauss(0, 0.08)
    ms = 240 + noise.gauss(0, 8) + (200 if noise.random() < 0.002 else 0)
    return {
        "event": "train", "time": BEGAN + 0.25 * i, "iteration": i, "train_iters": train_iters,
        "consumed_samples": 8 * i, "elapsed_ms": ms, "tflops_per_gpu": 28.0 / ms,
        "learning_rate": lr * min(1, i / 2000) * (0.55 + 0.45 * math.cos(math.pi * i / train_iters)),
        "global_batch_size": 8, "losses": {"lm loss": loss}, "loss_scale": 1.0,
        "grad_norm": 0.4 + 3 * math.exp(-i / 3000) + abs(noise.gauss(0, 0.1)), "num_zeros": None,
        "skipped_iterations": 0, "nan_iterations": 0, "tokens_per_second": 2048e3 / ms, "samples_per_second": 8e3 / ms,
        "epochs": {"text": i / 40_000}, "counted_tokens": 2048, "memory_bytes": 7 * 2**26, "peak_memory_bytes": 2**29,
        "memory_by_owner": {"parameters": 36 << 20, "gradients": 36 << 20, "moments": 72 << 20}, "mfu": None,
        "experts": [], "expert_ranks": 1,
    }  # fmt: skip


def norms(i: int, layers: int, noise: random.Random) -> dict[str, list[float]]:
    names = ["embedding.word_embeddings", *(f"decoder.layers.{n}" for n in range(layers)), "decoder.final_layernorm"]
    grow = 1 + i / 50_000
    return {n: [0.1 * grow * math.exp(noise.gauss(k / 12, 0.2)), 20.0 + k, 1e-3 * math.exp(noise.gauss(0, 0.2))]
            for k, n in enumerate(names)}  # fmt: skip


def timeline(i: int, ranks: int, microbatches: int, noise: random.Random, slow: int = 0) -> dict[str, Any]:
    """1F1B-like: every rank computes and waits; rank `slow` computes longer."""
    drawn = []
    for rank in range(ranks):
        events, now, share = [], 0.0, 1.3 if rank == slow and ranks > 1 else 1.0
        for name, length in [("forward", 0.010), ("backward", 0.020)] * microbatches:
            end = now + length * 1.32
            compute = length * share * noise.uniform(0.97, 1.0)
            events.append([name, "compute", round(now, 6), round(end - now, 6), ""])
            events.append(["all_reduce", "comm", round(now + compute * 0.9, 6), round(compute * 0.1, 6), "tp"])
            events.append(["wait", "wait", round(now + compute, 6), round(end - now - compute, 6), "tp"])
            now = end
        events.append(["optimizer_step", "compute", round(now, 6), 0.012, ""])
        drawn.append(events)
    return {"event": "timeline", "iteration": i, "seconds": 0.4, "ranks": drawn}


def stragglers(i: int, ranks: int, slow: int) -> dict[str, Any]:
    own = {"data": [2.0] * ranks, "forward": [60.0] * ranks, "backward": [120.0] * ranks, "optimizer": [12.0] * ranks}
    own["forward"][slow] = 95.0
    totals = [sum(times[r] for times in own.values()) for r in range(ranks)]
    one = {"rank": slow, "host": "node3", "section": "forward", "own_ms": 95.0, "peers_ms": 60.0, "excess_ms": 35.0}
    return {
        "event": "stragglers", "iteration": i, "steps": 100, "step_ms": 240.0, "own_ms": own,
        "wait_ms": {}, "own_total_ms": totals, "wait_total_ms": [240.0 - t for t in totals], "skew_ms": 35.0 + i % 7,
        "hosts": ["node3"] * ranks, "slow": [one | {"slow_steps": 99, "steps": 100, "when": "always"}],
    }  # fmt: skip


def records(
    steps: int, *, world: int = 1, layers: int = 0, seed: int = 0, first: int = 1, flags: str = "", lr: float = 1e-3
) -> Iterator[dict[str, Any]]:
    """A whole run: configuration, messages, steps, validation each 1,000 steps, timelines, an end."""
    noise, train_iters = random.Random(seed), first + steps - 1
    yield config(flags, world, train_iters)
    yield {"event": "message", "time": BEGAN, "text": f"run: {train_iters} steps of 8 samples of 256 tokens"}
    for i in range(first, first + steps):
        record = step(i, noise, train_iters, lr)
        if layers and i % 100 == 0:
            record["norms"] = norms(i, layers, noise)
        yield record
        if i % max(1, steps // 100) == 0:
            yield {"event": "validation", "iteration": i, "losses": {"lm loss": record["losses"]["lm loss"] + 0.1}}
        if i % max(1, steps // 10) == 0:
            yield timeline(i, world, 4, noise, world // 2)
            if world > 4:
                yield stragglers(i, world, world // 2)
    yield {"event": "end", "time": BEGAN + 0.25 * train_iters, "iteration": train_iters, "reason": ""}


def write(path: Path, *parts: Iterator[dict[str, Any]], end: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for part in parts:
            file.writelines(json.dumps(r) + "\n" for r in part if end or r["event"] != "end")
    return path
