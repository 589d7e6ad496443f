"""Lab 06, where sharding stops paying: tokens that hide the messages of a layer, and HSDP, which keeps them inside of a
machine.

`hybrid`: gradients of microbatches come from functions that the learner calls. What it does between two calls, and over
which group, is in the evidence.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import peak_at_most, sends
from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]

# ---------------------------------------------------------------------------------------------------------- tokens


def tokens_to_hide(
    parameters: float, ranks: int, flops: float, bandwidth: float, latency: float, weight: int, gradient: int
) -> float:
    """The tokens with which computation takes as long as the messages, in the slower of the two passes."""
    seconds = {name: (ranks - 1) * (latency + each * parameters / ranks / bandwidth) for name, each in
               (("gather", weight), ("sum", gradient))}  # fmt: skip
    forward, backward = 2 * parameters / flops, 4 * parameters / flops  # seconds a token
    return max(seconds["gather"] / forward, (seconds["gather"] + seconds["sum"]) / backward)


_HAND = {"parameters": 400, "ranks": 4, "flops": 800.0, "bandwidth": 100.0, "latency": 1.0, "weight": 2, "gradient": 4}
_SAME = {"parameters": 2e8, "ranks": 64, "flops": 4e14, "bandwidth": 5e10, "latency": 0.0, "weight": 2, "gradient": 2}


def _cluster(draw: Draw) -> dict[str, Any]:
    return {
        "parameters": 1e6 * draw.integer(50, 900), "ranks": draw.choice([8, 64, 512, 4096]),
        "flops": 1e14 * draw.integer(2, 9), "bandwidth": 1e10 * draw.integer(2, 45),
        "latency": 1e-6 * draw.integer(1, 20), "weight": draw.choice([1, 2]), "gradient": draw.choice([2, 4]),
    }  # fmt: skip


TOKENS = Exercise(
    "tokens_to_hide",
    reference=tokens_to_hide,
    rtol=1e-6,
    cases=[
        Case("4 ranks, 400 parameters, 2 + 4 bytes", _HAND),
        Case("no latency; gradients summed in bf16; one rank", _SAME, fixed=[{**_HAND, "ranks": 1}]),
        Case("other layers, other clusters", _cluster, points=2, hidden=True, fixed=[
            {**_HAND, "parameters": 401, "weight": 4, "gradient": 1}, {**_HAND, "weight": 1}]),
    ],
    idea="Two passes, two conditions. For each: how long does a token compute, and what has to travel meanwhile?",
    hint="part = parameters / ranks; gather = (ranks - 1)(latency + weight part / bandwidth); sum the same with "
    "gradient. The larger of gather flops / (2 parameters) and (gather + sum) flops / (4 parameters).",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------------- hybrid


def _drive(exercise: Any, gradients: Any, machine: Any = None, across: Any = None) -> Any:
    def ran(gradient: Any) -> Any:
        mark("backward")  # type: ignore[name-defined]  # noqa: F821
        return gradient.clone()

    passes = [lambda gradient=gradient: ran(gradient) for gradient in gradients]
    return exercise.hybrid(passes, machine, across)


def _summed(ranks: Inputs) -> list[torch.Tensor]:
    """The shards: rank r of a machine has the r-th part."""
    whole = torch.stack([gradient.double() for r in ranks for gradient in r["gradients"]]).sum(0)
    inside = _inside(ranks)
    whole = torch.cat([whole, whole.new_zeros(-len(whole) % inside)]).to(ranks[0]["gradients"][0].dtype)
    return [whole.chunk(inside)[place % inside] for place in range(len(ranks))]


def _inside(ranks: Inputs) -> int:
    """How many ranks a machine has: two, or three where there is one machine."""
    return 3 if len(ranks) == 3 else 2


def _machines(ranks: Inputs) -> list[list[int]]:
    """Ranks of a machine stand side by side."""
    inside = _inside(ranks)
    return [list(range(first, first + inside)) for first in range(0, len(ranks), inside)]


def _same_place(ranks: Inputs) -> list[list[int]]:
    return [list(places) for places in zip(*_machines(ranks), strict=True)]


def _each_once(answer: Answer) -> str | None:
    """Inside a reduce-scatter for each microbatch, at once; across one sum of shards, in one call or as its two
    halves."""
    machines = _machines(answer.inputs)
    for rank, one in enumerate(answer.evidence):
        given, machine = answer.inputs[rank]["gradients"], next(ranks for ranks in machines if rank in ranks)
        numbers = -(-given[0].numel() // len(machine))
        shard, padded = (each * given[0].itemsize for each in (numbers, -(-numbers // len(machines)) * len(machines)))
        inner = [call for call in one.calls if sorted(call.group) == machine]
        outer = [call for call in one.calls if sorted(call.group) != machine]
        much = sum(call.nbytes * (1 if call.name == "all_reduce" else 0.5) for call in outer)
        if much > padded:
            return (f"rank {rank} sums {int(much)} bytes between machines, in {len(outer)} calls. What crosses between "
                    f"machines is a shard, {shard} bytes, once a step")  # fmt: skip
        if other := next((call.name for call in inner if call.name != "reduce_scatter"), None):
            return f"rank {rank} calls {other} inside its machine; a reduce-scatter for each microbatch is enough"
        if len(inner) != len(given):
            return (f"rank {rank} calls reduce_scatter {len(inner)} times for {len(given)} microbatches: each leaves "
                    "at once, so that no whole gradient stays")  # fmt: skip
    return None


def _ranks(draw: Draw, ranks: int, numbers: int, microbatches: int) -> Inputs:
    return [{"gradients": [draw.tensor(numbers) for _ in range(microbatches)]} for _ in range(ranks)]


def _some(draw: Draw) -> Inputs:
    return _ranks(draw, 4, draw.integer(5, 9), draw.integer(2, 3))


def _one_machine(draw: Draw) -> Inputs:
    return _ranks(draw, 3, 7, 2)


def _large(draw: Draw) -> Inputs:
    return _ranks(draw, 4, 4097, 8)


_FOUR = [{"gradients": [torch.tensor([1.0, 2.0]) * 10.0**rank]} for rank in range(4)]

HYBRID = Exercise(
    "hybrid",
    reference=_summed,
    drive=_drive,
    group={"machine": _machines, "across": _same_place},
    accept=[sends("reduce_scatter", "all_reduce", "all_gather"), _each_once],
    cases=[
        Case("2 machines of 2 ranks; rank r has [1, 2] times 10^r, one microbatch", _FOUR),
        Case("several microbatches; lengths that need padding", _some, points=2, hidden=True, fixed=[_one_machine]),
        Case("eight microbatches, whose gradients are never all there", _large, hidden=True, accept=[
            peak_at_most("room for five gradients and copies", lambda ranks: 5.2 * 4 * 4097)]),
    ],
    idea="Which of the two sums makes the tensor smaller? And which of them has to wait for the last microbatch?",
    hint="For each microbatch: pad the gradient, reduce_scatter_tensor over machine, add the shard to a total. After "
    "the last: all_reduce of the total over across.",
)  # fmt: skip
