"""Lab 06, the step of a sharded optimizer: a rank clips by the norm of all shards, and updates its own."""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.checks import keeps_alive
from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]
SCALAR = 64  # bytes: a norm, a few counts


def _drive_adamw(
    exercise: Any, weights: Any, decay: Any, grads: Any, lr: float, weight_decay: float, betas: Any, eps: float,
    group: Any = None,
) -> Any:  # fmt: skip
    weights = weights.contiguous()  # as a flat buffer is
    optimizer = exercise.ShardedAdamW(weights, decay, lr, weight_decay, betas, eps, group)
    exercise.kept = optimizer  # it lives on: what it holds is counted
    found = []
    for grad in grads:
        optimizer.step(grad)
        found.append(weights.clone())
    return {f"weights after step {step}": one for step, one in enumerate(found, 1)}


def _updated(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """The weights after each step: one process that has all of them, in float64."""
    r, world = ranks[0], len(ranks)
    weights, (b1, b2) = r["weights"].double(), r["betas"]
    shrink = torch.ones_like(weights)
    for part, one in zip(shrink.chunk(world), ranks, strict=True):
        for start, stop in one["decay"]:
            part[start:stop] -= r["lr"] * r["weight_decay"]
    m = v = torch.zeros_like(weights)
    found = {}
    for t, shards in enumerate(zip(*(one["grads"] for one in ranks), strict=True), 1):
        grad = torch.cat(shards).double()
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        update = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + r["eps"])
        weights = weights * shrink - r["lr"] * update
        found[f"weights after step {t}"] = weights.to(r["weights"].dtype)
    return [found] * world


def _state(draw: Draw, ranks: int = 0, share: int = 0, steps: int = 3) -> Inputs:
    ranks, share = ranks or draw.integer(2, 4), share or draw.integer(5, 12)
    weights = draw.tensor(ranks * share)
    hyper = {"lr": draw.choice([0.1, 0.2]), "weight_decay": draw.choice([0.3, 0.5]),
             "betas": (0.9, draw.choice([0.95, 0.98])), "eps": draw.choice([1e-8, 0.05])}  # fmt: skip
    return [
        {"weights": weights.clone(), "grads": [draw.tensor(share) for _ in range(steps)], **hyper,
         "decay": _spans(draw, share)}
        for _ in range(ranks)
    ]  # fmt: skip


def _spans(draw: Draw, share: int) -> list[tuple[int, int]]:
    """Draw some stretches of a shard; on some ranks there are none."""
    cuts = sorted(draw.random.sample(range(share + 1), 4 if share > 4 else 2))
    return draw.choice([list(zip(cuts[::2], cuts[1::2], strict=True)), [], [(0, share)]])


_HYPER = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.95), "eps": 0.05}


def _two_with_gaps(draw: Draw) -> Inputs:
    """Stretches with weight decay on one rank, and none on the other."""
    weights = draw.tensor(12)
    return [
        {"weights": weights.clone(), "grads": [draw.tensor(6) for _ in range(3)], **_HYPER, "decay": decay}
        for decay in ([(0, 2), (3, 6)], [])
    ]


def _shards(draw: Draw) -> Inputs:
    """Draw four ranks with 16 KiB a shard."""
    return _state(draw, 4, 4096, steps=2)


def _small_steps(draw: Draw) -> Inputs:
    """Weights in bf16 between 1.5 and 2, and steps of less than half of the distance of two such numbers."""
    weights, steps = (1.5 + 0.45 * draw.tensor(8).sigmoid()).bfloat16(), 50
    return [
        {"weights": weights.clone(), "grads": [1 + 0.1 * draw.tensor(4).sigmoid() for _ in range(steps)], "lr": 0.003,
         "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "decay": []}
        for _ in range(2)
    ]  # fmt: skip


def _bytes(ranks: Inputs) -> float:
    return float(ranks[0]["weights"].nbytes)


def _one_gather_a_step(answer: Answer) -> str | None:
    whole, steps = _bytes(answer.inputs), len(answer.inputs[0]["grads"])
    for rank, one in enumerate(answer.evidence):
        if one.nbytes("all_reduce") > SCALAR:
            much = one.nbytes("all_reduce")
            return f"rank {rank} sums {much} bytes with all_reduce; new weights are gathered, not summed"
        moved = one.nbytes()
        if moved > steps * (whole + SCALAR):
            return (f"rank {rank} moves {moved} bytes; one all-gather of the weights a step is {int(steps * whole)}. "
                    "Gradients and moments stay where they are")  # fmt: skip
    return None


_TINY = [
    {"weights": torch.tensor([1.0, 2.0, 3.0, 4.0]), "grads": [torch.tensor([1.0, -1.0]) * 10.0**rank],
     "decay": [(0, 1)] if rank == 0 else [], "lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.95), "eps": 1e-8}
    for rank in range(2)
]  # fmt: skip


ADAMW = Exercise(
    "sharded_adamw",
    reference=_updated,
    function="ShardedAdamW",
    drive=_drive_adamw,
    group="group",
    changes=("weights",),
    cases=[
        Case("4 weights on 2 ranks, one step; only the first weight decays", _TINY),
        Case("three steps, decay on some stretches", _state, points=2, hidden=True, fixed=[_two_with_gaps]),
        Case("weights in bf16, gradients in fp32: fifty small steps", _small_steps, hidden=True, draws=1),
        Case("moments of a rank's own shard, and no more", _shards, hidden=True, accept=[
            keeps_alive("its two moments and a copy of its part of the weights",
                        lambda ranks: 3.5 * _bytes(ranks) / len(ranks))]),
        Case("one all-gather of the weights a step", _shards, hidden=True, accept=[_one_gather_a_step]),
    ],
    idea="Everything that AdamW does is per element. So what does a rank need of the elements that others update?",
    hint="own = weights.chunk(D)[rank], a view, or a copy in fp32 where weights are bf16; m and v are zeros_like(own). "
    "A step: t += 1; own[start:stop] *= 1 - lr * wd for the stretches; m and v averaged; own -= lr * m / (1 - b1^t) / "
    "(sqrt(v / (1 - b2^t)) + eps); then all_gather_into_tensor(weights, own.to(weights.dtype, copy=True), "
    "group=group).",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ clip


def _drive_clip(exercise: Any, shards: Any, max_norm: float, group: Any = None) -> Any:
    norm = exercise.clip(shards, max_norm, group)
    return {"norm": norm, "shards": shards}


def _clipped(ranks: Inputs) -> list[dict[str, Any]]:
    norm = math.hypot(*(float(shard.double().norm()) for r in ranks for shard in r["shards"]))
    factor = min(1.0, ranks[0]["max_norm"] / (norm + 1e-6))
    return [{"norm": norm, "shards": [(s.double() * factor).to(s.dtype) for s in r["shards"]]} for r in ranks]


def _some_shards(draw: Draw, ranks: int = 0) -> Inputs:
    """Draw shards whose norm is about 20 or more: in float64, too, nobody sees a 1e-6 that is added to it or not."""
    sizes, max_norm = [draw.integer(6, 12) for _ in range(3)], draw.integer(4, 9) / 4
    return [
        {"shards": [3 * (1 + rank) * draw.tensor(n) for n in sizes], "max_norm": max_norm}
        for rank in range(ranks or draw.integer(2, 4))
    ]


def _small(draw: Draw) -> Inputs:
    """Draw shards whose norm is below the limit, while the sum of the ranks' norms is above it."""
    shards = [0.3 * torch.ones(9), 0.3 * torch.ones(7)]
    return [{"shards": [s.clone() for s in shards], "max_norm": 2.0} for _ in range(2)]


def _nothing(draw: Draw) -> Inputs:
    return [{"shards": [torch.zeros(3), torch.zeros(0)], "max_norm": 1.0} for _ in range(3)]


def _an_empty_rank(draw: Draw) -> Inputs:
    """Draw a rank whose shards have no element, and one with padding alone."""
    ranks = _some_shards(draw, 3)
    ranks[0]["shards"] = [torch.zeros(0) for _ in range(3)]
    ranks[1]["shards"] = [torch.zeros(n) for n in (0, 4, 0)]
    return ranks


_THREE_FOUR = [
    {"shards": [torch.tensor([3.0]), torch.tensor([0.0])], "max_norm": 1.0},
    {"shards": [torch.tensor([0.0]), torch.tensor([4.0])], "max_norm": 1.0},
]
_ONE_HAS_NOTHING = [
    {"shards": [torch.tensor([3.0, 4.0]), torch.zeros(0)], "max_norm": 1.0},
    {"shards": [torch.zeros(0), torch.zeros(0)], "max_norm": 1.0},
]


def _one_sum(answer: Answer) -> str | None:
    """Check that the norm takes one sum, or one message in each direction."""
    for rank, one in enumerate(answer.evidence):
        if one.nbytes() > 2 * SCALAR:
            return f"rank {rank} moves {one.nbytes()} bytes; one sum of squares is {2 * SCALAR}"
        if len(one.calls) > 2:
            many = len(answer.inputs[rank]["shards"])
            return (f"rank {rank} communicates {len(one.calls)} times for {many} shards, and a model has hundreds. Add "
                    "up the squares of a rank first, then sum them over the ranks once")  # fmt: skip
    return None


CLIP = Exercise(
    "clip",
    reference=_clipped,
    drive=_drive_clip,
    group="group",
    changes=("shards",),
    accept=[_one_sum],
    cases=[
        Case("rank 0 has [3], [0], rank 1 has [0], [4]; at most 1", _THREE_FOUR),
        Case("rank 0 has [3, 4], [], rank 1 has [], []; at most 1", _ONE_HAS_NOTHING, errors={
            "has returned": "A rank that has nothing takes part all the same, with a 0: ranks send equally many "
            "numbers."}),
        Case("other shards, more than two", _some_shards, hidden=True, fixed=[_an_empty_rank]),
        Case("a gradient that is short enough, or 0", _small, hidden=True, fixed=[_nothing]),
    ],
    idea="Pythagoras: what of a shard can be added up over ranks, and what cannot?",
    hint="square = sum of (s * s).sum() over the shards; all_reduce(square, group=group); norm = square.sqrt(); "
    "multiply every shard in place by (max_norm / (norm + 1e-6)).clamp(max=1).",
)  # fmt: skip
