"""Lab 01, what is computed before anything runs: the bytes of a ring, the groups, each rank's samples, four questions.

All are pure functions of a few numbers. Groups come from one reshape, samples from a permutation that every rank draws
for itself; so all ranks know who does what, and nobody has to send it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch

from labkit.exercises import Case, Draw, Exercise, Mistake, instead
from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig

# ---------------------------------------------------------------------------------------------- bytes of a ring


def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """What each rank sends when the collective runs as a ring on a tensor of `nbytes` in all."""
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


def _an_all_reduce(draw: Draw) -> dict[str, Any]:
    return {"op": "all_reduce", "nbytes": 64 * draw.integer(1, 10**6), "ranks": draw.integer(2, 64)}


def _half_of_one(draw: Draw) -> dict[str, Any]:
    return {**_an_all_reduce(draw), "op": draw.choice(["all_gather", "reduce_scatter"])}


def _few_bytes(*ops: str) -> list[dict[str, Any]]:
    """Parts of a few bytes, of which most are no whole number: there a rounded answer is far off."""
    return [{"op": op, "nbytes": nbytes, "ranks": ranks} for op in ops for nbytes, ranks in ((7, 2), (10, 4), (5, 7))]


_EXACT = "A part has n/N bytes, which need not be a whole number: divide with `/`, and round nothing."

BYTES = Exercise(
    "bytes_sent",
    reference=bytes_sent,
    cases=[
        Case("an all-gather of 10 bytes in all over 4 ranks", {"op": "all_gather", "nbytes": 10, "ranks": 4}),
        Case("an all-reduce of 1 MiB over 4 ranks", {"op": "all_reduce", "nbytes": 1 << 20, "ranks": 4}),
        Case("one rank has nobody to send to", {"op": "all_reduce", "nbytes": 1 << 20, "ranks": 1}),
        Case("an all-reduce of another size, over other ranks", _an_all_reduce, hidden=True,
             fixed=_few_bytes("all_reduce")),
        Case("one of its halves", _half_of_one, hidden=True, fixed=_few_bytes("all_gather", "reduce_scatter")),
    ],
    mistakes=[
        Mistake(lambda op, nbytes, ranks: nbytes * (ranks - 1) / ranks, "An all-reduce is a reduce-scatter and then an "
                "all-gather."),
        Mistake(lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * nbytes, "Each rank already has its own "
                "part: N-1 of N parts travel."),
        Mistake(lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1), "A step of the ring "
                "sends one part, n/N bytes, not the whole tensor."),
        Mistake(lambda **sizes: math.floor(bytes_sent(**sizes)), _EXACT),
        Mistake(lambda **sizes: math.ceil(bytes_sent(**sizes)), _EXACT),
        Mistake(lambda op, nbytes, ranks: bytes_sent(op, ranks * (nbytes // ranks), ranks), _EXACT),
        Mistake(lambda op, nbytes, ranks: bytes_sent(op, ranks * -(-nbytes // ranks), ranks), _EXACT),
        Mistake(lambda op, nbytes, ranks: 2 * nbytes * (ranks - 1) / ranks, "Only an all-reduce takes both phases; an "
                "all-gather or a reduce-scatter is one of them."),
    ],
    hint="Count the steps of the ring and the bytes of one step: N-1 steps of n/N bytes, once or twice.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------ groups by a reshape


def axis_groups(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


def _as_named(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    """The dims of `axes` in the order in which they are named."""
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [names.index(n) for n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


def _fixed_reversed(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*reversed(fixed), *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


def _slowest_first(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    return axis_groups(dict(reversed(sizes.items())), axes)


def _in_blocks(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    n = math.prod(sizes[a] for a in axes)
    return torch.arange(math.prod(sizes.values())).view(-1, n).tolist()


def _a_layout(draw: Draw) -> dict[str, int]:
    return {name: draw.choice([1, 2, 3, 4]) for name in ("tp", "cp", "dp", "pp")}


def _one_axis(draw: Draw) -> dict[str, Any]:
    sizes = _a_layout(draw)
    return {"sizes": {**sizes, "cp": 2, "dp": 3}, "axes": [draw.choice(["tp", "cp", "dp", "pp"])]}


def _two_axes(draw: Draw) -> dict[str, Any]:
    sizes = {**_a_layout(draw), "tp": 2, "dp": 2, "pp": 2}
    return {"sizes": sizes, "axes": draw.choice([["dp", "cp"], ["tp", "pp"], ["cp", "dp"], ["tp", "cp", "dp"]])}


_SIXTEEN = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
_UNEQUAL = {"tp": 2, "cp": 3, "dp": 4, "pp": 2}


def _along(*several: str) -> list[dict[str, Any]]:
    return [{"sizes": _UNEQUAL, "axes": axes.split()} for axes in several]


GROUPS = Exercise(
    "axis_groups",
    without=["minimegatron.comm.mesh"],  # rank_groups
    reference=axis_groups,
    cases=[
        Case("tp groups of 16 ranks", {"sizes": _SIXTEEN, "axes": ["tp"]}),
        Case("dp groups of 16 ranks", {"sizes": _SIXTEEN, "axes": ["dp"]}),
        Case("dp-cp groups: everybody with the same weights", {"sizes": _SIXTEEN, "axes": ["dp", "cp"]}),
        Case("the expert grid is the same function", {"sizes": {"etp": 1, "ep": 4, "edp": 2, "pp": 2}, "axes": ["ep"]}),
        Case("one axis, other sizes", _one_axis, points=2, hidden=True,
             fixed=[*_along("tp", "cp", "dp", "pp"), {"sizes": {"tp": 2, "cp": 1, "dp": 3, "pp": 2}, "axes": ["cp"]}]),
        Case("several axes at once", _two_axes, points=2, hidden=True,
             fixed=_along("cp dp", "dp cp", "tp pp", "pp tp", "tp dp", "pp cp tp", "tp cp dp", "pp dp cp tp")),
    ],
    mistakes=[
        Mistake(_slowest_first, "The first axis in `sizes` varies fastest; `view` wants the slowest first."),
        Mistake(_in_blocks, "Neighbouring ranks are a group only along the fastest axis. Move the wanted dims last, "
                "then reshape."),
        Mistake(_as_named, "The order in `axes` says nothing: members of a group keep the order of the ranks. Leave "
                "the dims of `axes` in the order that they have in the grid."),
        Mistake(_fixed_reversed, "Groups are ordered by their first member: the dims that stay fixed keep their "
                "order, too."),
        Mistake(lambda sizes, axes: [g for g in axis_groups(sizes, axes) if len(g) > 1], "Along an axis of size 1 each "
                "rank is a group of one rank. Those belong to the list, too."),
    ],
    hint="grid = arange(world).view(slowest ... fastest); move the dims of `axes` behind all others, both in the order "
    "that they have in the grid, and reshape to [-1, members].",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ sampler


def my_samples(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    first = consumed + dp_rank * micro_batch
    return [
        int(_order(seed, p // num_samples, num_samples)[p % num_samples]) for p in range(first, first + micro_batch)
    ]


def _order(seed: int, epoch: int, num_samples: int) -> numpy.ndarray:
    return numpy.random.RandomState(seed + epoch).permutation(num_samples)


def _sampler(draw: Draw) -> dict[str, Any]:
    dp, micro = draw.integer(1, 8), draw.integer(1, 6)
    return {
        "consumed": dp * micro * draw.integer(0, 50),
        "micro_batch": micro,
        "dp_rank": draw.integer(0, dp - 1),
        "dp_size": dp,
        "num_samples": draw.integer(20, 60),
        "seed": draw.integer(0, 10**6),
    }


def _crossing(draw: Draw) -> dict[str, Any]:
    dp, micro, num_samples = draw.integer(1, 4), draw.integer(3, 6), draw.integer(20, 40)
    rank = draw.integer(0, dp - 1)
    inside = draw.integer(1, micro - 1)  # how many of this rank's samples belong to the earlier epoch
    consumed = num_samples * draw.integer(2, 9) - inside - rank * micro
    others = {"dp_size": dp, "num_samples": num_samples, "seed": draw.integer(0, 10**6)}
    return {"consumed": consumed, "micro_batch": micro, "dp_rank": rank, **others}


def _two_epochs(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)
    both = numpy.concatenate([_order(seed, e, num_samples) for e in (epoch, epoch + 1)])
    return [int(i) for i in both[place : place + micro_batch]]


def _epoch_of_consumed(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    first, order = consumed + dp_rank * micro_batch, _order(seed, consumed // num_samples, num_samples)
    return [int(order[p % num_samples]) for p in range(first, first + micro_batch)]


def _strided(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    order = [_order(seed, e, num_samples) for e in range(2 + (consumed + dp_size * micro_batch) // num_samples)]
    flat = numpy.concatenate(order)
    return [int(i) for i in flat[consumed + dp_rank : consumed + dp_rank + micro_batch * dp_size : dp_size]]


def _one_epoch(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    first = consumed + dp_rank * micro_batch
    order = _order(seed, first // num_samples, num_samples)
    return [int(order[p % num_samples]) for p in range(first, first + micro_batch)]


def _same_every_epoch(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    first = consumed + dp_rank * micro_batch
    return [int(_order(seed, 0, num_samples)[p % num_samples]) for p in range(first, first + micro_batch)]


_TEN = {"num_samples": 10, "seed": 1}
_FEW = {"num_samples": 4, "seed": 11}  # fewer samples than a batch: an epoch ends more than once in it
_SEVERAL = [
    {"consumed": 3, "micro_batch": 9, "dp_rank": 0, "dp_size": 1, **_FEW},
    {"consumed": 36, "micro_batch": 6, "dp_rank": 1, "dp_size": 3, **_FEW},
    {"consumed": 6, "micro_batch": 3, "dp_rank": 1, "dp_size": 2, **_TEN},  # begins in epoch 0; rank 1 is in the next
    {"consumed": 4, "micro_batch": 3, "dp_rank": 1, "dp_size": 2, **_TEN},  # ends with the epoch
    {"consumed": 7, "micro_batch": 3, "dp_rank": 1, "dp_size": 2, **_TEN},  # begins with one
    {"consumed": 40, "micro_batch": 5, "dp_rank": 3, "dp_size": 4, "num_samples": 7, "seed": 0},
]

SAMPLER = Exercise(
    "my_samples",
    reference=my_samples,
    cases=[
        Case("the first two of rank 1", {"consumed": 0, "micro_batch": 2, "dp_rank": 1, "dp_size": 2, **_TEN}),
        Case("after 8 samples", {"consumed": 8, "micro_batch": 1, "dp_rank": 0, "dp_size": 2, **_TEN}),
        Case("a batch that begins in one epoch and ends in the next",
             {"consumed": 18, "micro_batch": 4, "dp_rank": 0, "dp_size": 1, "num_samples": 10, "seed": 3}),
        Case("anywhere, any dp", _sampler, hidden=True),
        Case("across the ends of epochs", _crossing, hidden=True, fixed=_SEVERAL),
    ],
    mistakes=[
        Mistake(_same_every_epoch, "Every epoch has an order of its own: seed + epoch."),
        Mistake(_one_epoch, "A batch can begin in one epoch and end in the next: find the epoch of each sample, not of "
                "the batch."),
        Mistake(_strided, "Rank r takes a contiguous block: positions consumed + r*micro_batch and the micro_batch-1 "
                "after it."),
        Mistake(_two_epochs, "With few samples a batch holds the end of more than one epoch: find the epoch of each "
                "sample."),
        Mistake(_epoch_of_consumed, "When the batch begins in one epoch, this rank's part may be in the next: find "
                "the epoch of each sample."),
    ],
    hint="Global position p has epoch p // num_samples and place p % num_samples in that epoch's permutation.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    world: int, tp: int, cp: int, pp: int, ep: int, etp: int, gigabytes: float, gb_per_second: float
) -> dict[str, Any]:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    peers = rank_groups(parallel, world, "dp-cp")
    n = len(peers[0])
    return {
        "dp": parallel.data_parallel_size(world),
        "edp": world // (etp * ep * pp),
        "same_weights_as_rank_0": peers[0][:4],
        "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second,
    }


def _a_cluster(draw: Draw) -> dict[str, Any]:
    tp, cp, pp = draw.choice([2, 4, 8]), draw.choice([1, 2]), draw.choice([2, 4])
    dp, etp = draw.choice([4, 8]), draw.choice([1, 2])
    sizes = {"world": tp * cp * pp * dp, "tp": tp, "cp": cp, "pp": pp, "ep": draw.choice([2, 4]), "etp": etp}
    return {**sizes, "gigabytes": float(draw.integer(1, 20)), "gb_per_second": float(draw.integer(10, 400))}


_SIXTY_FOUR = {"world": 64, "tp": 4, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "gigabytes": 7.0, "gb_per_second": 50.0}

_CLUSTERS = [  # no two of the numbers that may be mixed up are equal
    {"world": 384, "tp": 4, "cp": 3, "pp": 2, "ep": 8, "etp": 2, "gigabytes": 5.0, "gb_per_second": 30.0},
    {"world": 96, "tp": 2, "cp": 1, "pp": 3, "ep": 4, "etp": 1, "gigabytes": 3.0, "gb_per_second": 7.0},
    {"world": 120, "tp": 1, "cp": 2, "pp": 5, "ep": 6, "etp": 1, "gigabytes": 1.0, "gb_per_second": 64.0},
]


def _seconds(ranks: Callable[..., int], ways: int = 2) -> Callable[..., dict[str, Any]]:
    """The answer with another number of ranks, or of phases, in the time."""

    def seconds(gigabytes: float, gb_per_second: float, **sizes: int) -> float:
        n = ranks(**sizes)
        return ways * gigabytes * (n - 1) / n / gb_per_second

    return instead(answers, all_reduce_seconds=seconds)


QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("64 ranks", _SIXTY_FOUR),
        Case("another cluster", _a_cluster, points=2, hidden=True, fixed=_CLUSTERS),
    ],
    mistakes=[
        Mistake(instead(answers, dp=lambda world, tp, cp, pp, ep, **_: world // (tp * cp * pp * ep)), "Expert "
                "parallelism takes no ranks of its own: dp = world / (tp * cp * pp)."),
        Mistake(instead(answers, edp=lambda world, pp, ep, **_: world // (ep * pp)), "The expert grid has an axis etp: "
                "edp = world / (etp * ep * pp)."),
        Mistake(instead(answers, edp=lambda world, tp, pp, ep, **_: world // (tp * ep * pp)), "The expert grid has "
                "etp in place of tp: edp = world / (etp * ep * pp)."),
        Mistake(instead(answers, same_weights_as_rank_0=lambda **_: [0, 1, 2, 3]), "The tp ranks come first, and each "
                "holds other columns: rank 0's dp-cp group goes in steps of tp."),
        Mistake(_seconds(lambda world, tp, pp, **_: world // (tp * pp), ways=1), "An all-reduce sends the ring's bytes "
                "twice: a reduce-scatter, then an all-gather."),
        Mistake(_seconds(lambda world, tp, cp, pp, **_: world // (tp * cp * pp)), "The group is dp-cp: it has dp * cp "
                "ranks, not dp."),
        Mistake(_seconds(lambda world, **_: world), "The ring is rank 0's dp-cp group, not all ranks."),
    ],
    hint="dp from the dense grid, edp from the expert grid; the peers are rank 0's dp-cp group, its first four; "
    "the time is the ring's bytes over the bandwidth.",
)  # fmt: skip
