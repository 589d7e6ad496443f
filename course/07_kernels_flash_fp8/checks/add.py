"""Checks of lab 07, second part: a first kernel, a thread a number."""

from __future__ import annotations

from typing import Any

import torch

from course.lab07.compiling import prepare
from labkit.exercises import Answer, Case, Draw, Exercise

from .launched import OneLaunch, coalesced, launch_of


def add(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """The sum in float64."""
    return x.double() + r.double()


def _wrong_formulas(x: torch.Tensor, r: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
    a, b = x.double(), r.double()
    return [(a, "this is x: r is not added"), (b, "this is r: x is not added"), (a - b, "this is x - r"),
            (a * b, "this is x times r")]  # fmt: skip


def _as_many_blocks_as_needed(answer: Answer) -> str | None:
    launch, n = launch_of(answer), answer.inputs["x"].numel()
    threads, needed = launch["block"], -(-n // launch["block"])
    if launch["grid"] == needed:
        return None
    return f"{n} numbers in blocks of {threads} threads: grid is {launch['grid']}, expected {needed}"


def _flat(low: int, high: int) -> Any:
    return lambda draw: _inputs(draw, draw.integer(low, high))


def _inputs(draw: Draw, *shape: int) -> dict[str, Any]:
    return {"x": draw.tensor(*shape), "r": draw.tensor(*shape)}


def _matrix(draw: Draw) -> dict[str, Any]:
    return _inputs(draw, draw.integer(3, 9), draw.integer(90, 300))


ADDED = OneLaunch("add", ("x", "r"), add, _wrong_formulas)
_HAND = {"x": torch.arange(10.0), "r": 100 * torch.arange(10.0)}

ADD = Exercise(
    "add",
    prepare=prepare,
    accept=[ADDED.right],
    cases=[
        Case("ten numbers, one block", _HAND),
        Case("several blocks, the last one not full", _flat(600, 1000), hidden=True, fixed=[_flat(257, 257)]),
        Case("blocks that are full", lambda draw: _inputs(draw, 256 * draw.integer(2, 4)), hidden=True, fixed=[
            _flat(1, 1), _flat(256, 256)]),
        Case("a matrix; as many blocks as needed, a number a thread", _matrix, hidden=True, accept=[
            _as_many_blocks_as_needed, coalesced], fixed=[_flat(512, 512), _flat(513, 513)]),
    ],
    idea="Each thread has one place i of its own, counted over all blocks; the last block may have threads too many.",
    hint="int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = x[i] + r[i]; and n / 256 blocks, "
    "rounded up: (n + 255) // 256.",
)  # fmt: skip
EXERCISES = [ADD]
