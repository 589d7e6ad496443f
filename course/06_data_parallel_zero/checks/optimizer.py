"""Lab 06, the step of a sharded optimizer: a rank clips by the norm of all shards, and updates its own."""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import at_most
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


def _updated(
    ranks: Inputs, *, gather: bool = True, corrected: bool = True, decayed: str = "own", coupled: bool = False,
    inside: bool = False, averages: bool = True, first: bool = False, turned: bool = False, after: bool = False,
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """The weights after each step; the keywords make mistakes."""
    world, dtype = len(ranks), ranks[0]["weights"].dtype
    parts = []
    for r, me in zip(ranks, range(world), strict=True):
        own = r["weights"].double().chunk(world)[me].clone()
        decays = torch.zeros_like(own)
        for start, stop in r["decay"]:
            decays[start:stop] = 1
        if decayed != "own":
            decays[:] = float(decayed == "all")
        m, v, (b1, b2), steps = torch.zeros_like(own), torch.zeros_like(own), r["betas"], []
        for t, one in enumerate(r["grads"], 1):
            grad = one.double() + (r["weight_decay"] * own * decays if coupled else 0)
            m = b1 * m + (1 - b1) * grad if averages else grad
            v = b2 * v + (1 - b2) * grad**2
            c1, c2 = (1 - b1 ** (1 if first else t), 1 - b2 ** (1 if first else t)) if corrected else (1.0, 1.0)
            size = ((v / c2) + r["eps"]).sqrt() if inside else (v / c2).sqrt() + r["eps"]
            shrink = 1 - r["lr"] * r["weight_decay"] * decays * (not coupled)
            update = r["lr"] * (m / c1 if averages else m) / size
            own = (own - update) * shrink if after else own * shrink - update
            steps.append(own)
        parts.append(steps)
    found = []
    for me, r in enumerate(ranks):
        said = []
        for step in range(len(r["grads"])):
            pieces = [part[step] for part in parts]
            if not gather:
                pieces = [p if i == me else w for i, (p, w) in enumerate(zip(
                    pieces, r["weights"].double().chunk(world), strict=True))]  # fmt: skip
            said.append(torch.cat(pieces[1:] + pieces[:1] if turned else pieces).to(dtype))
        found.append({f"weights after step {step}": one for step, one in enumerate(said, 1)})
    return found


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


def _own_state(answer: Answer) -> str | None:
    """Check that a rank keeps two moments of a shard, in whatever form; a program may keep a copy of its shard as
    well."""
    part = int(_bytes(answer.inputs)) // len(answer.inputs)
    for rank, one in enumerate(answer.evidence):
        if one.alive > 3.5 * part:
            every = ", as much as the moments of all weights" if one.alive >= 2 * _bytes(answer.inputs) else ""
            return (f"rank {rank} keeps {one.alive} bytes{every}, in tensors, arrays, bytes or lists. Its part of the "
                    f"weights has {part}, its two moments {2 * part}; a copy of the part may lie beside "
                    "them")  # fmt: skip
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
        Case("moments of a rank's own shard, and no more", _shards, points=2, hidden=True, accept=[
            _own_state]),
        Case("one all-gather of the weights a step", _shards, hidden=True, accept=[_one_gather_a_step]),
    ],
    idea="Everything that AdamW does is per element. So what does a rank need of the elements that others update?",
    hint="own = weights.chunk(D)[rank], a view; m and v are zeros_like(own). A step: t += 1; own[start:stop] *= 1 - lr "
    "* wd for the stretches; m and v averaged; own -= lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps); then "
    "all_gather_into_tensor(weights, own.clone(), group=group).",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ clip


def _drive_clip(exercise: Any, shards: Any, max_norm: float, group: Any = None) -> Any:
    norm = exercise.clip(shards, max_norm, group)
    return {"norm": norm, "shards": shards}


def _clipped(
    ranks: Inputs, norm_of: Any = None, factor_of: Any = None, after: bool = False
) -> list[dict[str, Any]]:  # fmt: skip
    """The clipped gradients.

    Args:
        norm_of, factor_of, after: mistakes: `norm_of(squares of all ranks, own rank)`, `factor_of(norm, max_norm)`, and
            a factor that is taken after the step.
    """
    squares = [sum(float(s.double().square().sum()) for s in r["shards"]) for r in ranks]
    found = []
    for rank, r in enumerate(ranks):
        norm = norm_of(squares, rank) if norm_of else sum(squares) ** 0.5
        factor = factor_of(norm, r["max_norm"]) if factor_of else min(1.0, r["max_norm"] / (norm + 1e-6))
        found.append(
            {
                "norm": norm * factor if after else norm,
                "shards": [(s.double() * factor).to(s.dtype) for s in r["shards"]],
            }
        )
    return found


def _some_shards(draw: Draw, ranks: int = 0) -> Inputs:
    """Draw shards whose norm is about 6 or more."""
    sizes, max_norm = [draw.integer(6, 12) for _ in range(3)], draw.integer(4, 9) / 4
    return [
        {"shards": [(1 + rank) * draw.tensor(n) for n in sizes], "max_norm": max_norm}
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


def _one_message(answer: Answer) -> str | None:
    """Check that the norm takes one sum, or one message in each direction."""
    for rank, one in enumerate(answer.evidence):
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
    accept=[at_most("one sum of squares", lambda ranks: 2 * SCALAR), _one_message],
    cases=[
        Case("rank 0 has [3], [0], rank 1 has [0], [4]; at most 1", _THREE_FOUR),
        Case("rank 0 has [3, 4], [], rank 1 has [], []; at most 1", _ONE_HAS_NOTHING),
        Case("other shards, more than two", _some_shards, hidden=True, fixed=[_an_empty_rank]),
        Case("a gradient that is short enough, or 0", _small, hidden=True, fixed=[_nothing]),
    ],
    errors={"has returned": "A rank that has nothing takes part all the same: the others wait for its 0."},
    idea="Pythagoras: what of a shard can be added up over ranks, and what cannot?",
    hint="square = sum of (s * s).sum() over the shards; all_reduce(square, group=group); norm = square.sqrt(); "
    "multiply every shard in place by (max_norm / (norm + 1e-6)).clamp(max=1).",
)  # fmt: skip
