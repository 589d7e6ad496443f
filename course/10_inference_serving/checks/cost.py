"""Lab 10, what is predicted: bytes and seconds of a decode step, and how many sequences a GPU holds."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def decode_step(
    model: dict[str, int], sequences: int, length: int, page: int, gpu: dict[str, float], **mistake: Any
) -> dict[str, float]:
    """Keywords of `mistake` are mistakes."""
    numbers = mistake.get("both", 2) * model["groups"] * model["d"]
    token = numbers * model["bytes"] * (1 if mistake.get("one_layer") else model["layers"])
    weights = model["parameters"] * model["bytes"]
    read = weights * (sequences if mistake.get("weights_each") else 1)
    read += token * mistake.get("cached", lambda s, n: s * n)(sequences, length)
    computing = mistake.get("flops", 2) * model["parameters"] * mistake.get("computed", lambda s: s)(sequences)
    times = read / gpu["bandwidth"], computing / gpu["flops"]
    seconds = mistake.get("seconds", max)(times)
    left = gpu["memory"] - (0 if mistake.get("no_weights") else weights)
    pages = mistake.get("pages", lambda n, size: -(-n // size))(length, page)
    most = left // (token * page) // max(1, pages)
    if mistake.get("no_pages"):
        most = left // (token * length)
    rate = (1 if mistake.get("one_token") else sequences) / seconds
    return {"token": token, "read": read, "seconds": seconds, "rate": rate, "most": most}


_SMALL: dict[str, int] = {"parameters": 1000, "layers": 2, "groups": 1, "d": 5, "bytes": 2}
_EXAMPLE: dict[str, Any] = {
    "model": _SMALL, "sequences": 4, "length": 25, "page": 10,
    "gpu": {"memory": 10_000, "bandwidth": 1000, "flops": 4000},
}  # fmt: skip
_BUSY: dict[str, Any] = {
    **_EXAMPLE,
    "sequences": 5,
    "length": 20,
    "gpu": {"memory": 10_000, "bandwidth": 1000, "flops": 1000},
}


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
