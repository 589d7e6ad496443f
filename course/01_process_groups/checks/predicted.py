"""Lab 01, what is computed before anything runs: the bytes of a ring, the groups, each rank's samples, four questions.

All are pure functions of a few numbers. Groups come from one reshape, samples from a permutation that every rank draws
for itself; so each rank computes the groups and samples of all ranks, and no message is needed.
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
    """Cases of a few bytes, most of which do not divide by the ranks: there a rounded answer is far off."""
    return [{"op": op, "nbytes": nbytes, "ranks": ranks} for op in ops for nbytes, ranks in ((7, 2), (10, 4), (5, 7))]


_EXACT = "You round. A part has n/N bytes, which need not be a whole number."

BYTES = Exercise(
    "bytes_sent",
    reference=bytes_sent,
    cases=[
        Case("an all-gather of 10 bytes in all over 4 ranks", {"op": "all_gather", "nbytes": 10, "ranks": 4}),
        # Not a row of its own: nothing at all would be right there.
        Case("an all-reduce of 1 MiB over 4 ranks, and on one", {"op": "all_reduce", "nbytes": 1 << 20, "ranks": 4},
             points=2, fixed=[{"op": "all_reduce", "nbytes": 1 << 20, "ranks": 1}]),
        Case("an all-reduce of another size, over other ranks", _an_all_reduce, hidden=True,
             fixed=_few_bytes("all_reduce")),
        Case("a reduce-scatter or all-gather", _half_of_one, hidden=True,
             fixed=[*_few_bytes("all_gather", "reduce_scatter"),
                    *({"op": op, "nbytes": 12, "ranks": 1} for op in ("all_gather", "reduce_scatter"))]),
    ],
    mistakes=[
        Mistake(lambda op, nbytes, ranks: nbytes * (ranks - 1) / ranks, "An all-reduce is a reduce-scatter and then an "
                "all-gather."),
        Mistake(lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * nbytes, "Each rank already has its own "
                "part: N-1 of N parts travel."),
        Mistake(lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1), "N times too much. "
                "In a step a rank sends one part, n/N bytes."),
        Mistake(lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * (ranks - 1), "This is the number of "
                "steps. Asked are the bytes that are sent in all of them."),
        Mistake(lambda op, nbytes, ranks: (2 if op == "all_reduce" else 1) * math.log2(ranks) * nbytes / ranks, "You "
                "count log2 N steps, those of a tree. In a ring a part passes every rank."),
        Mistake(lambda **sizes: math.floor(bytes_sent(**sizes)), _EXACT),
        Mistake(lambda **sizes: math.ceil(bytes_sent(**sizes)), _EXACT),
        Mistake(lambda op, nbytes, ranks: bytes_sent(op, ranks * (nbytes // ranks), ranks), _EXACT),
        Mistake(lambda op, nbytes, ranks: bytes_sent(op, ranks * -(-nbytes // ranks), ranks), _EXACT),
        Mistake(lambda op, nbytes, ranks: 2 * nbytes * (ranks - 1) / ranks, "Twice too much. An all-gather "
                "or a reduce-scatter is one phase of two, and what arrives is not sent."),
    ],
    idea="Count the steps of the ring, and the bytes that a rank sends in one step.",
    hint="N-1 steps of n/N bytes: once for an all-gather or a reduce-scatter, twice for an all-reduce. Do not round.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------ groups by a reshape


def axis_groups(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


def _as_named(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    """The groups in which dims of `axes` are taken in the order in which they are named, not in that of the mesh."""
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


def _the_other_axes(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    return axis_groups(sizes, [axis for axis in sizes if axis not in axes])


def _each_axis_alone(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    return [group for axis in axes for group in axis_groups(sizes, [axis])]


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
        Case("dp-cp groups of 16 ranks, axes=['cp', 'dp']", {"sizes": _SIXTEEN, "axes": ["cp", "dp"]}),
        Case("ep groups of an expert grid", {"sizes": {"etp": 1, "ep": 4, "edp": 2, "pp": 2}, "axes": ["ep"]}),
        Case("one axis, other sizes", _one_axis, points=2, hidden=True,
             fixed=[*_along("tp", "cp", "dp", "pp"), {"sizes": {"tp": 2, "cp": 1, "dp": 3, "pp": 2}, "axes": ["cp"]},
                    {"sizes": {"dp": 2, "pp": 3, "tp": 4}, "axes": ["tp"]}]),  # in an order of its own
        Case("several axes at once", _two_axes, points=2, hidden=True,
             fixed=_along("cp dp", "dp cp", "tp pp", "pp tp", "tp dp", "pp cp tp", "tp cp dp", "pp dp cp tp")),
    ],
    mistakes=[
        Mistake(_slowest_first, "The first axis in `sizes` varies fastest; `view` and `reshape` want the "
                "slowest first."),
        Mistake(lambda sizes, axes: axis_groups(sizes, axes)[0], "This is the group of rank 0. Asked are all groups."),
        Mistake(_in_blocks, "You cut the ranks into blocks of neighbours. Neighbours are a group along the fastest "
                "axis only."),
        Mistake(_as_named, "You list the ranks of a group in the order of `axes`. The order in `axes` says nothing: "
                "the ranks of a group ascend."),
        Mistake(_the_other_axes, "Your groups hold the ranks with the same place along `axes`. Along `axes` the ranks "
                "of a group differ."),
        Mistake(_each_axis_alone, "You list the groups of each axis by itself. With several axes a group holds the "
                "ranks that differ in any of them."),
        Mistake(lambda sizes, axes: axis_groups(sizes, axes[:1]), "These are the groups along one of the axes only. "
                "With several axes a group holds the ranks that differ in any of them."),
        Mistake(_fixed_reversed, "The groups are right and their order is not. Groups are ordered by their first "
                "rank."),
        Mistake(lambda sizes, axes: [g for g in axis_groups(sizes, axes) if len(g) > 1], "Groups of one rank are "
                "missing. Along an axis of size 1 every rank is such a group."),
    ],
    idea="See the ranks as an array with one dim for each axis. Which dims vary inside a group, and which stay fixed?",
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


def _new_generator(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    first = consumed + dp_rank * micro_batch
    return [
        int(numpy.random.default_rng(seed + p // num_samples).permutation(num_samples)[p % num_samples])
        for p in range(first, first + micro_batch)
    ]


def _torch_order(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    def at(place: int) -> int:
        generator = torch.Generator().manual_seed(seed + place // num_samples)
        return int(torch.randperm(num_samples, generator=generator)[place % num_samples])

    first = consumed + dp_rank * micro_batch
    return [at(place) for place in range(first, first + micro_batch)]


def _one_generator(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    first, generator = consumed + dp_rank * micro_batch, numpy.random.RandomState(seed)
    epochs = 1 + (first + micro_batch) // num_samples
    stream = numpy.concatenate([generator.permutation(num_samples) for _ in range(epochs)])
    return [int(i) for i in stream[first : first + micro_batch]]


def _own_part_of_the_data(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> Any:
    if dp_size == 1:  # there a part of the data is all of it
        return NotImplemented
    epoch, read = divmod(consumed, num_samples)
    share = num_samples // dp_size
    first, end = dp_rank * share + read // dp_size, (dp_rank + 1) * share
    return [int(i) for i in _order(seed, epoch, num_samples)[first : min(first + micro_batch, end)]]


def _ends_with_the_epoch(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    epoch, first = divmod(consumed, num_samples)
    first += dp_rank * micro_batch
    return [int(i) for i in _order(seed, epoch, num_samples)[first : first + micro_batch]]


def _drops_the_last(
    consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int
) -> list[int]:
    batch, first = micro_batch * dp_size, consumed + dp_rank * micro_batch
    used = max(num_samples // batch * batch, 1)
    return [int(_order(seed, p // used, num_samples)[p % used]) for p in range(first, first + micro_batch)]


def _places(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    first = consumed + dp_rank * micro_batch
    return [place % num_samples for place in range(first, first + micro_batch)]


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
        Case("consumed=0, micro_batch=2, dp_rank=1, dp_size=2, num_samples=10, seed=1",
             {"consumed": 0, "micro_batch": 2, "dp_rank": 1, "dp_size": 2, **_TEN}),
        Case("consumed=8, micro_batch=1, dp_rank=0, dp_size=2, num_samples=10, seed=1",
             {"consumed": 8, "micro_batch": 1, "dp_rank": 0, "dp_size": 2, **_TEN}),
        Case("consumed=18, micro_batch=4, dp_rank=0, dp_size=1, num_samples=10, seed=3: two epochs",
             {"consumed": 18, "micro_batch": 4, "dp_rank": 0, "dp_size": 1, "num_samples": 10, "seed": 3}),
        Case("anywhere, any dp", _sampler, hidden=True),
        Case("across the ends of epochs", _crossing, hidden=True, fixed=_SEVERAL),
    ],
    mistakes=[
        Mistake(_new_generator, "Your orders come from another generator, `default_rng`. Asked are those of "
                "`numpy.random.RandomState`."),
        Mistake(_torch_order, "Your orders come from another generator, `torch.randperm`. Asked are those of "
                "`numpy.random.RandomState`."),
        Mistake(_places, "These are places in the order of an epoch. Asked are the samples that stand there."),
        Mistake(lambda dp_rank, **rest: my_samples(dp_rank=0, **rest), "Every rank gets the same samples, those "
                "of rank 0."),
        Mistake(lambda micro_batch, dp_rank, dp_size, **rest: my_samples(
            micro_batch=micro_batch * dp_size, dp_rank=0, dp_size=1, **rest), "These are the samples of all ranks. "
                "Asked are those of one."),
        Mistake(lambda consumed, dp_size, **rest: my_samples(consumed * dp_size, dp_size=dp_size, **rest), "`consumed` "
                "counts the samples of the whole run already, not those of one rank."),
        Mistake(_same_every_epoch, "You read every epoch in the same order. Each has an order of its own, from a seed "
                "of its own."),
        Mistake(_one_generator, "Your later epochs come from the generator of the first. Each epoch has a seed of its "
                "own."),
        Mistake(_own_part_of_the_data, "You give each rank a part of the data set for a whole epoch. All ranks read "
                "from one stream, a batch after the other."),
        Mistake(_drops_the_last, "You drop the samples at the end of an epoch that fill no batch. Every sample is "
                "read: a batch goes on in the next epoch."),
        Mistake(_ends_with_the_epoch, "Your list ends with the epoch. The samples of the next epoch follow at once."),
        Mistake(_one_epoch, "You give all samples of a rank the same epoch. A micro-batch can begin in one epoch and "
                "end in the next."),
        Mistake(_strided, "You deal the samples out one by one, in turn. Each rank takes a contiguous block."),
        Mistake(_two_epochs, "You look at two epochs at most. With few samples a micro-batch holds the ends of more "
                "than one epoch."),
        Mistake(_epoch_of_consumed, "You take the epoch in which the batch begins. This rank's part may be in the "
                "next one."),
    ],
    idea="Number the places of the whole stream, over all epochs. Which places are this rank's, and in which epoch is "
    "each of them?",
    hint="This rank's places begin at consumed + dp_rank * micro_batch. Place p belongs to epoch p // num_samples, and "
    "stands at p % num_samples in the permutation of that epoch.",
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


_FORTY_EIGHT = {"world": 48, "tp": 4, "cp": 2, "pp": 2, "ep": 2, "etp": 1, "gigabytes": 7.0, "gb_per_second": 50.0}

_CLUSTERS = [  # no two of the numbers that may be mixed up are equal
    {"world": 384, "tp": 4, "cp": 3, "pp": 2, "ep": 8, "etp": 2, "gigabytes": 5.0, "gb_per_second": 30.0},
    {"world": 96, "tp": 2, "cp": 1, "pp": 3, "ep": 4, "etp": 1, "gigabytes": 3.0, "gb_per_second": 7.0},
    {"world": 12, "tp": 2, "cp": 1, "pp": 2, "ep": 2, "etp": 1, "gigabytes": 2.0, "gb_per_second": 9.0},  # 3 ranks
    {"world": 120, "tp": 1, "cp": 2, "pp": 5, "ep": 6, "etp": 1, "gigabytes": 1.0, "gb_per_second": 64.0},
]


def _seconds(ranks: Callable[..., int], ways: int = 2) -> Callable[..., dict[str, Any]]:
    """Return a mistaken answer: its time is computed with another number of ranks, or of phases."""

    def seconds(gigabytes: float, gb_per_second: float, **sizes: int) -> float:
        n = ranks(**sizes)
        return ways * gigabytes * (n - 1) / n / gb_per_second

    return instead(answers, all_reduce_seconds=seconds)


def _all_from(step: int, n: int, dp: int, edp: int, gigabytes: float, gb_per_second: float) -> dict[str, Any]:
    """The whole answer that follows from a mistaken group of n ranks: its ranks and its time."""
    seconds = 2 * gigabytes * (n - 1) / n / gb_per_second
    group = [step * i for i in range(min(n, 4))]
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": group, "all_reduce_seconds": seconds}


def _ep_takes_ranks(world: int, tp: int, cp: int, pp: int, ep: int, etp: int, **link: float) -> dict[str, Any]:
    dp = max(1, world // (tp * cp * pp * ep))
    return _all_from(tp, dp * cp, dp, world // (etp * ep * pp), **link)


def _dp_for_dp_cp(world: int, tp: int, cp: int, pp: int, ep: int, etp: int, **link: float) -> dict[str, Any]:
    dp = world // (tp * cp * pp)
    return _all_from(tp * cp, dp, dp, world // (etp * ep * pp), **link)


def _whole_in_each_step(world: int, tp: int, pp: int, gigabytes: float, gb_per_second: float, **_: int) -> float:
    return 2 * gigabytes * (world // (tp * pp) - 1) / gb_per_second


def _in_bits(**cluster: Any) -> float:
    return 8 * float(answers(**cluster)["all_reduce_seconds"])


def _dp_group(world: int, tp: int, cp: int, pp: int, **_: Any) -> list[int]:
    return [tp * cp * i for i in range(world // (tp * cp * pp))][:4]


_EP_TAKES_NONE = "dp: you divide by ep. Expert parallelism takes no ranks of its own."
_CP_TOO = "same_weights_as_rank_0: this is rank 0's dp group. The cp ranks hold the same weights, too."

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("48 ranks, tp=4, cp=2, pp=2, ep=2, etp=1, 7 GB at 50 GB/s", _FORTY_EIGHT),
        Case("another cluster", _a_cluster, points=2, hidden=True, fixed=_CLUSTERS),
    ],
    mistakes=[
        Mistake(instead(answers, dp=lambda world, tp, cp, pp, ep, **_: world // (tp * cp * pp * ep)), _EP_TAKES_NONE),
        Mistake(_ep_takes_ranks, _EP_TAKES_NONE),
        Mistake(instead(answers, edp=lambda world, pp, ep, **_: world // (ep * pp)), "edp: you leave out etp, which "
                "is an axis of the expert grid."),
        Mistake(instead(answers, edp=lambda world, tp, pp, ep, **_: world // (tp * ep * pp)), "edp: you divide "
                "by tp. The expert grid has etp in its place."),
        Mistake(instead(answers, edp=lambda world, tp, cp, pp, ep, **_: world // (tp * cp * pp) // ep), "edp: you "
                "divide dp by ep. The expert grid lays out all tp * cp * dp ranks."),
        Mistake(instead(answers, same_weights_as_rank_0=lambda **_: [0, 1, 2, 3]), "same_weights_as_rank_0: neighbours "
                "of rank 0 are its tp group. They hold other weights; asked is its dp-cp group."),
        Mistake(instead(answers, same_weights_as_rank_0=_dp_group), _CP_TOO),
        Mistake(_dp_for_dp_cp, _CP_TOO),
        Mistake(instead(answers, all_reduce_seconds=lambda gigabytes, gb_per_second, **_: 2 * gigabytes
                / gb_per_second), "all_reduce_seconds: a rank does not send its own part. In each phase N-1 of N parts "
                "travel."),
        Mistake(_seconds(lambda world, tp, pp, **_: world // (tp * pp), ways=1), "all_reduce_seconds: the time of "
                "one half of the ring's bytes. An all-reduce has two phases."),
        Mistake(_seconds(lambda world, tp, pp, **_: min(4, world // (tp * pp))), "all_reduce_seconds: your ring has "
                "the first four ranks only. The whole dp-cp group sums its gradients."),
        Mistake(instead(answers, all_reduce_seconds=_whole_in_each_step), "all_reduce_seconds: N times too long. A "
                "step of the ring sends one part of N."),
        Mistake(instead(answers, all_reduce_seconds=_in_bits), "all_reduce_seconds: eight times too long. The link "
                "sends gigabytes per second, not gigabits."),
        Mistake(_seconds(lambda world, tp, cp, pp, **_: world // (tp * cp * pp)), "all_reduce_seconds: your ring "
                "has the ranks of the dp group. The dp-cp group is larger."),
        Mistake(_seconds(lambda world, **_: world), "all_reduce_seconds: your ring has all "
                "ranks of the world; asked is rank 0's dp-cp group."),
    ],
    idea="The same ranks stand on two grids, one with tp, cp, dp, pp and one with etp, ep, edp, pp. Which grid answers "
    "which question?",
    hint="dp = world / (tp * cp * pp); edp = world / (etp * ep * pp); rank 0's dp-cp group goes in steps of tp and has "
    "n = dp * cp ranks; the time is 2 * gigabytes * (n - 1) / n / gb_per_second.",
)  # fmt: skip
