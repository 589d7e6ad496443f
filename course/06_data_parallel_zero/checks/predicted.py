"""Lab 06, predictions: bytes that a rank holds, bytes that it sends, six questions."""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises import Case, Draw, Exercise

# ----------------------------------------------------------------------------------------------------- held

ZERO, MEGATRON = {"weight": 2, "gradient": 2, "optimizer": 12}, {"weight": 2, "gradient": 4, "optimizer": 12}


def bytes_held(parameters: int, ranks: int, stage: int, weight: int, gradient: int, optimizer: int) -> dict[str, float]:
    """The bytes of a rank; stage s shards the last s of weights, gradients and optimizer state."""
    whole = {"weights": weight, "gradients": gradient, "optimizer": optimizer}
    return {
        name: parameters * each / (ranks if stage >= 3 - place else 1)
        for place, (name, each) in enumerate(whole.items())
    }


def _model(draw: Draw) -> dict[str, Any]:
    each = draw.choice([ZERO, MEGATRON, {"weight": 4, "gradient": 4, "optimizer": 8}])
    millions, ranks, stage = draw.integer(1, 900), draw.integer(2, 64), draw.integer(0, 3)
    return {"parameters": millions * 10**6, "ranks": ranks, "stage": stage, **each}


_PAPER = {"parameters": 7_500_000_000, "ranks": 64, **ZERO}
_ODD = {"parameters": 31, "ranks": 7, "weight": 1, "gradient": 3, "optimizer": 5}


HELD = Exercise(
    "bytes_held",
    reference=bytes_held,
    cases=[
        Case("10 parameters, 2 ranks, stage 2, 2 + 2 + 12 bytes", {"parameters": 10, "ranks": 2, "stage": 2, **ZERO}),
        Case("the ZeRO paper's 7.5 B on 64 ranks, stages 0 to 3", {**_PAPER, "stage": 0}, fixed=[
            {**_PAPER, "stage": stage} for stage in (1, 2, 3)]),
        Case("Megatron's 2 + 4 + 12 bytes and others", _model, hidden=True, fixed=[
            *({**_ODD, "stage": stage} for stage in range(4)), {**_PAPER, **MEGATRON, "stage": 2}]),
    ],
    idea="A stage is a number of things that are shared out. In which order do they come, and why in that one?",
    hint="optimizer / ranks from stage 1 on, gradients from stage 2 on, weights in stage 3; times parameters.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- sent


def bytes_sent(
    stage: int, weights: int, gradients: int, ranks: int, microbatches: int = 1, kept: bool = False
) -> float:
    """The bytes of a rank. Reduce-scatter and all-gather each send (D-1)/D of the whole; an all-reduce consists of
    both."""
    f = (ranks - 1) / ranks
    if stage == 0:
        return 2 * f * gradients
    reduced = f * gradients * (microbatches if stage >= 2 else 1)
    return reduced + f * weights * ((1 if kept else 2) * microbatches if stage == 3 else 1)


def _step(draw: Draw) -> dict[str, Any]:
    each = 1000 * draw.integer(1, 900)
    return {"stage": draw.integer(0, 3), "weights": 2 * each, "gradients": draw.choice([2, 4]) * each,
            "ranks": draw.integer(2, 16), "microbatches": draw.integer(2, 8),
            "kept": draw.choice([False, True])}  # fmt: skip


_SMALL = {"weights": 8, "gradients": 16, "ranks": 4, "microbatches": 1, "kept": False}
_TWO = {"weights": 600, "gradients": 1200, "ranks": 3, "microbatches": 4, "kept": False}
_KEPT = {"weights": 600, "gradients": 1200, "ranks": 4, "microbatches": 3, "kept": True}


SENT = Exercise(
    "bytes_sent",
    reference=bytes_sent,
    cases=[
        Case("4 ranks, 8 bytes of weights, 16 of gradients, stages 0 to 3", {**_SMALL, "stage": 0}, fixed=[
            {**_SMALL, "stage": stage} for stage in (1, 2, 3)]),
        Case("the same with two microbatches; weights that are kept; one rank", {**_SMALL, "stage": 1,
             "microbatches": 2}, fixed=[{**_SMALL, "stage": 2, "microbatches": 2}, {**_SMALL, "stage": 3, "kept": True},
             {**_SMALL, "stage": 3, "ranks": 1}]),
        Case("several microbatches; weights that are kept", _step, points=2, hidden=True, fixed=[
            {**one, "stage": stage} for one in (_TWO, _KEPT) for stage in range(4)]),
    ],
    idea="List the collectives of one step: which tensor, and how often. In stages 0 and 1 whole gradients wait on "
    "the rank. Each collective sends the part that a rank does not keep.",
    hint="f = (D-1)/D. Stage 0: 2 f G. Stage 1: f G + f W. Stage 2: m f G + f W. Stage 3: m (f G + 2 f W), "
    "with kept weights m (f G + f W).",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ questions

STAGES = {
    "torch DistributedDataParallel": 0, "FSDP1 NO_SHARD": 0, "Megatron --use-distributed-optimizer": 1,
    "Megatron optim": 1, "torch ZeroRedundancyOptimizer": 1, "Megatron optim_grads": 2, "FSDP1 SHARD_GRAD_OP": 2,
    "Megatron optim_grads_params": 3, "FSDP1 FULL_SHARD": 3, "FSDP2 fully_shard": 3,
}  # fmt: skip


def answers(
    parameters: float, ranks: int, microbatches: int, gigabytes: float, machines: int, names: list[str]
) -> dict[str, Any]:
    room, state = gigabytes * 1e9, (2 * parameters, 2 * parameters, 12 * parameters)
    held = [sum(part / (ranks if stage >= 3 - place else 1) for place, part in enumerate(state)) for stage in range(4)]
    left = room - 4 * parameters
    shards = ranks // machines
    return {
        "stage": next((stage for stage in range(4) if held[stage] <= room), -1),
        "ranks_for_stage_1": math.ceil(12 * parameters / left) if left > 0 else 0,
        "stage_2_over_stage_1": (microbatches + 1) / 2,
        "stage_3_over_stage_1": 3 * microbatches / 2,
        "between_machines": 2 * (machines - 1) / machines * 2 * parameters / shards,
        "stages": [STAGES[name] for name in names],
    }


def _cluster(draw: Draw) -> dict[str, Any]:
    machines = draw.choice([2, 3, 4])
    return {
        "parameters": 1e9 * draw.integer(2, 30), "ranks": machines * draw.choice([2, 4, 8]),
        "microbatches": draw.integer(2, 16), "gigabytes": float(draw.choice([24, 40, 80, 141])), "machines": machines,
        "names": draw.random.sample(list(STAGES), 6),
    }  # fmt: skip


_TINY = {"parameters": 1e9, "ranks": 12, "microbatches": 2, "gigabytes": 10.0, "machines": 3,
         "names": ["FSDP2 fully_shard", "Megatron optim"]}  # fmt: skip
_NO_STAGE_1 = {"parameters": 3e10, "ranks": 8, "microbatches": 5, "gigabytes": 80.0, "machines": 2,
               "names": list(STAGES)}  # fmt: skip
_FITS = {**_TINY, "gigabytes": 16.0}
_AT_THE_EDGE = [
    {**_TINY, "ranks": 5, "machines": 5, "gigabytes": room}
    for room in (16.0, 15.9, 6.41, 6.39, 4.81, 4.79, 3.21, 3.19, 4.0)
]
_STAGE_2 = {"parameters": 1e9, "ranks": 16, "microbatches": 3, "gigabytes": 3.0, "machines": 4,
            "names": ["Megatron optim"]}  # fmt: skip
_EXACT = {"parameters": 2e9, "ranks": 6, "microbatches": 4, "gigabytes": 12.0, "machines": 3, "names": list(STAGES)}


QUESTIONS = Exercise(
    "answers",
    reference=answers,
    rtol=1e-6,
    cases=[
        Case("10^9 parameters, 12 ranks of 10 GB on 3 machines", _TINY),
        Case("the same with 1 GB a rank: nothing fits", {**_TINY, "gigabytes": 1.0}),
        Case("other models, other clusters", _cluster, points=2, hidden=True, fixed=[
            _NO_STAGE_1, _FITS, _STAGE_2, _EXACT, *_AT_THE_EDGE]),
    ],
    idea="Which of the three is shared out, and how often does each message leave in a step of m microbatches?",
    hint="Held: 4 P + 12 P/d in stage 1, so d >= 12 P / (room - 4 P). Sent: stage 1 f (G + W), stage 2 f (m G + W), "
    "stage 3 f m (G + 2 W), with G = W. HSDP: an all-reduce of 2 P / (ranks / machines) bytes over the machines.",
)  # fmt: skip
