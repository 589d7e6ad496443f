"""Lab 10, what is predicted: bytes and seconds of a decode step, and how many sequences a GPU holds."""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises import Case, Draw, Exercise


def decode_step(
    model: dict[str, int], sequences: int, length: int, page: int, gpu: dict[str, float]
) -> dict[str, float]:
    token = sum(2 * model["groups"] * model["d"] * model["bytes"] for _ in range(model["layers"]))
    weights, tokens = model["parameters"] * model["bytes"], sequences * length
    computing = 2 * model["parameters"] * sequences / gpu["flops"]
    seconds = max((weights + tokens * token) / gpu["bandwidth"], computing)
    most = (gpu["memory"] - weights) // (token * page) // math.ceil(length / page)
    return {"token": token, "read": weights + tokens * token, "seconds": seconds, "rate": sequences / seconds,
            "most": most}  # fmt: skip


_SMALL: dict[str, int] = {"parameters": 1000, "layers": 2, "groups": 1, "d": 5, "bytes": 2}
_EXAMPLE: dict[str, Any] = {
    "model": _SMALL, "sequences": 4, "length": 25, "page": 10,
    "gpu": {"memory": 10_000, "bandwidth": 1000, "flops": 4000},
}  # fmt: skip
_BUSY: dict[str, Any] = {**_EXAMPLE, "sequences": 5, "length": 20, "gpu": {**_EXAMPLE["gpu"], "flops": 1000}}


def _some(draw: Draw) -> dict[str, Any]:
    model = {
        "parameters": draw.integer(1, 30) * 10**9 + draw.integer(0, 10**6), "layers": draw.integer(12, 80),
        "groups": draw.choice([1, 2, 4, 8]), "d": draw.choice([64, 128, 192]), "bytes": draw.choice([1, 2, 4]),
    }  # fmt: skip
    weights = model["parameters"] * model["bytes"]
    gpu = {
        "memory": weights + draw.integer(5, 100) * 10**9, "bandwidth": draw.integer(300, 8000) * 10**9,
        "flops": draw.choice([2, 20, 100, 900]) * 10**12,
    }  # fmt: skip
    return {
        "model": model, "sequences": draw.integer(2, 300), "length": draw.integer(50, 9000),
        "page": draw.choice([8, 16, 32]), "gpu": gpu,
    }  # fmt: skip


DECODE = Exercise(
    "decode_step",
    reference=decode_step,
    cases=[
        Case("the example: 4 sequences of 25 tokens", _EXAMPLE),
        Case("5 sequences of 20 tokens on a GPU that computes more slowly", _BUSY),
        Case("other models and GPUs", _some, points=2, hidden=True, fixed=[
            {**_EXAMPLE, "model": {**_SMALL, "bytes": 4}}, {**_BUSY, "model": {**_SMALL, "bytes": 1, "groups": 3}},
            {**_EXAMPLE, "length": 21}, {**_EXAMPLE, "length": 30, "sequences": 1},
            {**_BUSY, "length": 1, "sequences": 3},
            {**_EXAMPLE, "gpu": {**_EXAMPLE["gpu"], "memory": 2399.0}},
            {**_EXAMPLE, "gpu": {**_EXAMPLE["gpu"], "memory": 4399}},
            {**_EXAMPLE, "gpu": {**_EXAMPLE["gpu"], "memory": 3600}}]),
    ],
    idea="What does one token leave behind; what must be read for one step, once or for each sequence?",
    hint="token = 2 * layers * groups * d * bytes; read = parameters * bytes + sequences * length * token; seconds = "
    "max(read / bandwidth, 2 * parameters * sequences / flops); most = whole pages left // pages of a sequence.",
)  # fmt: skip
