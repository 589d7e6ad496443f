"""Lab 06, predictions: bytes that a rank holds, bytes that it sends, six questions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

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
    return {
        "parameters": draw.integer(1, 900) * 10**6,
        "ranks": draw.integer(2, 64),
        "stage": draw.integer(0, 3),
        **each,
    }


_PAPER = {"parameters": 7_500_000_000, "ranks": 64, **ZERO}
_ODD = {"parameters": 31, "ranks": 7, "weight": 1, "gradient": 3, "optimizer": 5}


def _divided(**at: int) -> Any:
    """Return a mistake in which each kind of state is divided from this stage on."""
    return lambda parameters, ranks, stage, weight, gradient, optimizer: {
        "weights": parameters * weight / (ranks if stage >= at.get("weights", 3) else 1),
        "gradients": parameters * gradient / (ranks if stage >= at.get("gradients", 2) else 1),
        "optimizer": parameters * optimizer / (ranks if stage >= at.get("optimizer", 1) else 1),
    }


_NEVER = 9
_held = partial(instead, bytes_held)

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
    mistakes=[
        Mistake(lambda parameters, ranks, **i: {name: value * (parameters // ranks) / (parameters / ranks)
                if value < parameters * each else value for (name, value), each in zip(
                    bytes_held(parameters, ranks, **i).items(), (i["weight"], i["gradient"], i["optimizer"]),
                    strict=True)}, "The parameters of a rank are rounded to a whole number here. Do not round: a part "
                "is a fraction of all bytes."),
        Mistake(_divided(optimizer=1, gradients=1, weights=1), "Everything is divided from stage 1 on. Each stage "
                "shares out one more of the three."),
        Mistake(_divided(optimizer=2, gradients=1), "Stage 1 shares out the optimizer's state, the largest of the "
                "three; gradients come next."),
        Mistake(_divided(weights=_NEVER), "In stage 3 the weights are shared out, too."),
        Mistake(_divided(optimizer=2, gradients=3, weights=_NEVER), "Off by one stage: stage 1 already shares out "
                "the optimizer's state."),
        Mistake(_held(
            optimizer=lambda parameters, ranks, stage, optimizer, **_: parameters * optimizer
            / (ranks if stage == 1 else 1),
        ), "A higher stage keeps what a lower one has shared out: the optimizer's state is divided in stages 1, 2, 3."),
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


def _changed(**fixed: Any) -> Any:
    return lambda **inputs: bytes_sent(**{**inputs, **fixed})


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
    mistakes=[
        Mistake(_changed(microbatches=1), "In stages 2 and 3 there is no whole gradient that could wait for the next "
                "microbatch: each of them sends its own."),
        Mistake(_changed(kept=False), "Where the weights are kept, the backward pass needs no second gather."),
        Mistake(lambda kept, **i: bytes_sent(kept=True, **i), "Stage 3 gathers each weight twice, for the forward "
                "pass and again for the backward pass; you count one."),
        Mistake(lambda kept, **i: bytes_sent(kept=not kept, **i), "It is the other way round: kept weights are "
                "gathered once, the others twice."),
        Mistake(lambda stage, ranks, gradients, **i: bytes_sent(stage, gradients=gradients, ranks=ranks, **i)
                / (2 if stage == 0 else 1), "An all-reduce is a reduce-scatter and an all-gather: count both."),
        Mistake(lambda ranks, **i: bytes_sent(ranks=ranks, **i) / max(ranks - 1, 1), "1/D of a tensor is what a rank "
                "keeps. It sends the rest."),
        Mistake(lambda stage, weights, microbatches, kept, ranks, **i: bytes_sent(
            stage, weights, microbatches=microbatches, kept=kept, ranks=ranks, **i)
            - (weights * (ranks - 1) / ranks if kept and stage == 2 else 0), "`kept` matters in stage 3 only: in stage "
            "2 weights are gathered once a step, after it, and that gather stays."),
        Mistake(lambda ranks, **i: bytes_sent(ranks=ranks, **i) * ranks / max(ranks - 1, 1), "A rank keeps its own "
                "part: (D-1)/D of the bytes leave."),
        Mistake(lambda stage, weights, gradients, ranks, **i: bytes_sent(stage, gradients, gradients, ranks, **i),
                "What is gathered are weights; they may have fewer bytes than gradients."),
        Mistake(lambda stage, microbatches, gradients, ranks, **i: bytes_sent(
            stage, gradients=gradients, ranks=ranks, microbatches=microbatches, **i)
            * (microbatches if stage < 2 else 1), "Stages 0 and 1 add gradients up on the rank and send once a step."),
        Mistake(lambda stage, microbatches, weights, ranks, **i: bytes_sent(
            stage, weights, ranks=ranks, microbatches=microbatches, **i)
            + ((microbatches - 1) * weights * (ranks - 1) / ranks if stage == 2 else 0), "In stage 2 weights change "
            "once a step, and are gathered once a step."),
        Mistake(lambda stage, weights, ranks, **i: bytes_sent(stage, weights, ranks=ranks, **i)
                - (weights * (ranks - 1) / ranks if stage in (1, 2) else 0), "After the step each rank has new weights "
                "of its own shard only: they are gathered."),
    ],
    idea="List the collectives of one step: which tensor, how often. Each sends the part that a rank does not keep.",
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
_STAGE_2 = {
    "parameters": 1e9,
    "ranks": 16,
    "microbatches": 3,
    "gigabytes": 3.0,
    "machines": 4,
    "names": ["Megatron optim"],
}
_EXACT = {"parameters": 2e9, "ranks": 6, "microbatches": 4, "gigabytes": 12.0, "machines": 3, "names": list(STAGES)}

_wrong = partial(instead, answers)


def _stage_of(parameters: float, ranks: int, gigabytes: float, at_most: bool = True) -> list[bool]:
    """Whether each stage fits; with `at_most` exactly full memory fits."""
    held = [
        sum(part / (ranks if stage >= 3 - place else 1) for place, part in enumerate((2, 2, 12))) * parameters
        for stage in range(4)
    ]
    return [each <= gigabytes * 1e9 if at_most else each < gigabytes * 1e9 for each in held]


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
    mistakes=[
        Mistake(_wrong(stage=lambda parameters, ranks, gigabytes, **_: next(
            (s for s, fits in enumerate(_stage_of(parameters, ranks, gigabytes)) if fits), 3)),
            "Where no stage fits `stage` is -1."),
        Mistake(_wrong(stage=lambda parameters, ranks, gigabytes, **_: next(
            (s for s, fits in enumerate(_stage_of(parameters, ranks, gigabytes, at_most=False)) if fits), -1)),
            "What just fits, fits: a rank that holds exactly `gigabytes` · 10⁹ bytes is full, and works."),
        Mistake(_wrong(stage=lambda parameters, ranks, gigabytes, **_: next(
            (s for s, fits in enumerate(_stage_of(parameters, ranks, gigabytes * 2**30 / 1e9)) if fits), -1),
            ranks_for_stage_1=lambda parameters, gigabytes, **_: math.ceil(12 * parameters / left)
            if (left := gigabytes * 2**30 - 4 * parameters) > 0 else 0),
            "A gigabyte is 10⁹ bytes, not 2³⁰."),
        Mistake(_wrong(stage_3_over_stage_1=lambda microbatches, **_: float(microbatches)), "In stage 3 each "
                "microbatch gathers every weight twice, for forward and for backward; you count one gather."),
        Mistake(_wrong(stage_3_over_stage_1=lambda microbatches, **_: (microbatches + 2) / 2),
                "In stage 3 each microbatch gathers the weights twice; that is not twice a step."),
        Mistake(_wrong(between_machines=lambda parameters, machines, ranks, **_: 2 * (ranks // machines - 1)
                / (ranks // machines) * 2 * parameters / machines), "Two sizes have changed places: the gradient is "
                "cut over the ranks of one machine, and the ring goes over the machines."),
        Mistake(_wrong(stages=lambda names, **_: {name: STAGES[name] for name in names}),
                "`stages` is a list, in the order of `names`."),
        Mistake(_wrong(stage=lambda parameters, ranks, gigabytes, **_: 1 + next(
            (s for s, fits in enumerate(_stage_of(parameters, ranks, gigabytes)) if fits), -2)),
            "`stage` is a number from 0, of the paper's counting."),
        Mistake(_wrong(ranks_for_stage_1=lambda parameters, gigabytes, **_: math.floor(
            12 * parameters / (gigabytes * 1e9 - 4 * parameters)) if gigabytes * 1e9 > 4 * parameters else 0),
            "A rank too few is too few: round up."),
        Mistake(_wrong(ranks_for_stage_1=lambda parameters, gigabytes, **_: math.ceil(
            16 * parameters / (gigabytes * 1e9))), "Stage 1 shares out 12 of the 16 bytes. The other 4 are on every "
            "rank."),
        Mistake(_wrong(stage_2_over_stage_1=lambda microbatches, **_: float(microbatches)), "Stage 2 reduces "
                "gradients m times, and gathers weights once: of the two halves only one grows."),
        Mistake(_wrong(stage_2_over_stage_1=lambda **_: 1.0, stage_3_over_stage_1=lambda **_: 1.5), "That is one "
                "microbatch. With m of them stages 2 and 3 talk in each."),
        Mistake(_wrong(between_machines=lambda parameters, machines, **_: 4 * (machines - 1) / machines * parameters),
                "A rank sums its own shard with the same shard of other machines, not the whole gradient."),
        Mistake(_wrong(between_machines=lambda parameters, machines, ranks, **_: 2 * (machines - 1) / machines
                * parameters / (ranks // machines)), "An all-reduce sends two times (R-1)/R of 2 bytes a gradient."),
        Mistake(_wrong(between_machines=lambda parameters, machines, ranks, **_: 4 * (machines - 1) / machines
                * parameters / ranks), "The gradient is cut over the ranks of one machine, not over all ranks."),
    ],
    idea="Which of the three is shared out, and how often does each message leave in a step of m microbatches?",
    hint="Held: 4 P + 12 P/d in stage 1, so d >= 12 P / (room - 4 P). Sent: stage 1 f (G + W), stage 2 f (m G + W), "
    "stage 3 f m (G + 2 W), with G = W. HSDP: an all-reduce of 2 P / (ranks / machines) bytes over the machines.",
)  # fmt: skip
