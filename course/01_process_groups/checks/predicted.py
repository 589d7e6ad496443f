"""Lab 01, what is computed before anything runs: the bytes of a ring, the groups, each rank's samples, when the last
bucket arrives, four questions.

All are pure functions of a few numbers. Groups come from one reshape, samples from a permutation that every rank draws
for itself; so each rank computes the groups and samples of all ranks, and no message is needed.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy
import torch

from labkit.exercises import Case, Draw, Exercise
from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig

# ---------------------------------------------------------------------------------------------- bytes of a ring


def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """What each rank sends when the collective runs as a ring on a tensor of `nbytes` in all.

    In an all-to-all the part for the rank at distance d is sent d times; each rank has one part for each distance.
    """
    if op == "all_to_all":
        return sum(range(ranks)) * nbytes / ranks
    return (2 if op == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


def _an_all_reduce(draw: Draw) -> dict[str, Any]:
    return {"op": "all_reduce", "nbytes": 64 * draw.integer(1, 10**6), "ranks": draw.integer(2, 64)}


def _half_of_one(draw: Draw) -> dict[str, Any]:
    return {**_an_all_reduce(draw), "op": draw.choice(["all_gather", "reduce_scatter"])}


def _few_bytes(*ops: str) -> list[dict[str, Any]]:
    """Cases of a few bytes, most of which do not divide by the ranks: there a rounded answer is far off."""
    return [{"op": op, "nbytes": nbytes, "ranks": ranks} for op in ops for nbytes, ranks in ((7, 2), (10, 4), (5, 7))]


BYTES = Exercise(
    "bytes_sent",
    reference=bytes_sent,
    cases=[
        Case("an all-gather of 10 bytes in all over 4 ranks", {"op": "all_gather", "nbytes": 10, "ranks": 4}),
        # Not a row of its own: nothing at all would be right there.
        Case("an all-reduce of 1 MiB over 4 ranks, and on one", {"op": "all_reduce", "nbytes": 1 << 20, "ranks": 4},
             fixed=[{"op": "all_reduce", "nbytes": 1 << 20, "ranks": 1}]),
        Case("an all-reduce of another size, over other ranks", _an_all_reduce, hidden=True,
             fixed=_few_bytes("all_reduce")),
        Case("a reduce-scatter or all-gather", _half_of_one, hidden=True,
             fixed=[*_few_bytes("all_gather", "reduce_scatter"),
                    *({"op": op, "nbytes": 12, "ranks": 1} for op in ("all_gather", "reduce_scatter"))]),
        Case("an all-to-all of 12 bytes over 3 ranks; of 7 over 2, 10 over 4, 5 over 7, 12 on one",
             {"op": "all_to_all", "nbytes": 12, "ranks": 3},
             fixed=[*_few_bytes("all_to_all"), {"op": "all_to_all", "nbytes": 12, "ranks": 1}]),
    ],
    idea="Count the steps of the ring, and the bytes that a rank sends in one step. In an all-to-all, draw three ranks "
    "and follow the part that rank 0 has for rank 2.",
    hint="N-1 steps of n/N bytes: once for an all-gather or a reduce-scatter, twice for an all-reduce. In an all-to-"
    "all the part for the rank at distance d is sent d times: 1 + 2 + ... + (N-1) times n/N bytes. Do not round.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------ groups by a reshape


def axis_groups(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    names = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[n] for n in names])
    fixed = [i for i, n in enumerate(names) if n not in axes]
    free = [i for i, n in enumerate(names) if n in axes]
    return grid.permute(*fixed, *free).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()


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
    idea="See the ranks as an array with one dim for each axis. Which dims vary inside a group, and which stay fixed?",
    hint="grid = arange(world).view(slowest ... fastest); move the dims of `axes` behind all others, both in the order "
    "that they have in the grid, and reshape to [-1, members].",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ sampler


def my_samples(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    first = consumed + dp_rank * micro_batch
    orders = [numpy.random.RandomState(seed + epoch) for epoch in range((first + micro_batch) // num_samples + 1)]
    stream = [number for order in orders for number in order.permutation(num_samples).tolist()]
    return stream[first : first + micro_batch]


def _sampler(draw: Draw) -> dict[str, Any]:
    """Draw a batch inside a later epoch: of the ends of epochs the other case asks."""
    dp, micro = draw.integer(2, 8), draw.integer(2, 6)
    num_samples = dp * micro + draw.integer(5, 40)
    return {
        "consumed": num_samples * draw.integer(1, 9) + draw.integer(0, num_samples - dp * micro), "micro_batch": micro,
        "dp_rank": draw.integer(1, dp - 1), "dp_size": dp, "num_samples": num_samples, "seed": draw.integer(0, 10**6),
    }  # fmt: skip


def _crossing(draw: Draw) -> dict[str, Any]:
    dp, micro, num_samples = draw.integer(1, 4), draw.integer(3, 6), draw.integer(20, 40)
    rank = draw.integer(0, dp - 1)
    inside = draw.integer(1, micro - 1)  # how many of this rank's samples belong to the earlier epoch
    consumed = num_samples * draw.integer(2, 9) - inside - rank * micro
    others = {"dp_size": dp, "num_samples": num_samples, "seed": draw.integer(0, 10**6)}
    return {"consumed": consumed, "micro_batch": micro, "dp_rank": rank, **others}


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
    idea="Number the places of the whole stream, over all epochs. Which places are this rank's, and in which epoch is "
    "each of them?",
    hint="This rank's places begin at consumed + dp_rank * micro_batch. Place p belongs to epoch p // num_samples, and "
    "stands at p % num_samples in the permutation of that epoch.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------- the last bucket's sum


def last_arrival(ready: list[float], elements: list[int], bucket_size: int, latency: float, per_second: float) -> float:
    """Buckets first, then the latest of all ways: from a bucket's leave on all that follow may travel without a gap."""
    buckets, held = list[tuple[float, float]](), 0  # (when it leaves, how long it travels)
    for moment, n in zip(ready, elements, strict=True):
        held += n
        if held >= bucket_size:
            buckets.append((moment, latency + held / per_second))
            held = 0
    if held:
        buckets.append((ready[-1], latency + held / per_second))
    return max(leaves + sum(seconds for _, seconds in buckets[at:]) for at, (leaves, _) in enumerate(buckets))


def _a_pass(draw: Draw) -> dict[str, Any]:
    layers = draw.integer(6, 14)
    return {
        "ready": list(itertools.accumulate(0.5 * draw.integer(1, 9) for _ in range(layers))),
        "elements": [draw.integer(1, 40) for _ in range(layers)], "bucket_size": draw.integer(10, 60),
        "latency": 0.25 * draw.integer(1, 12), "per_second": float(draw.integer(4, 40)),
    }  # fmt: skip


_FIVE = {"ready": [5.0, 10.0, 15.0, 20.0, 25.0], "elements": [3, 4, 2, 5, 1], "latency": 4.0, "per_second": 1.0}
_EXACT = {**_FIVE, "elements": [2, 4, 3, 3, 6], "bucket_size": 6}  # each full to the last element, none left over
_FAST = {**_FIVE, "bucket_size": 6, "latency": 0.5, "per_second": 10.0}  # the network is free when a bucket leaves
_ONE = {**_FIVE, "ready": [5.0], "elements": [3], "bucket_size": 6}
_SLOW = {**_FIVE, "bucket_size": 6, "latency": 9.0, "per_second": 0.5}  # busy from the first bucket on
_OVER = {**_FIVE, "elements": [9, 9, 1, 1, 9], "bucket_size": 4}  # what is above bucket_size is in no next bucket


ARRIVAL = Exercise(
    "last_arrival",
    reference=last_arrival,
    cases=[
        Case("the example, with buckets of 6, of 1 and of 100 elements", {**_FIVE, "bucket_size": 6}, fixed=[
            {**_FIVE, "bucket_size": 1}, {**_FIVE, "bucket_size": 100}]),
        Case("a fast network, 0.5 s and 0.1 s an element; a single gradient", _FAST, fixed=[_ONE]),
        Case("other gradients, other networks", _a_pass, points=2, hidden=True, fixed=[_EXACT, _SLOW, _OVER]),
    ],
    idea="Two clocks: that of the backward pass and that of the network. When can a full bucket begin to travel? And "
    "the one that never becomes full?",
    hint="free = 0, when the network is free. A bucket that leaves at a moment arrives at max(free, moment) + latency "
    "+ its elements / per_second: the new free. What is left after the last gradient is a bucket, too.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    world: int, tp: int, cp: int, pp: int, ep: int, etp: int, gigabytes: float, gb_per_second: float
) -> dict[str, Any]:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
    )  # fmt: skip
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


QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("48 ranks, tp=4, cp=2, pp=2, ep=2, etp=1, 7 GB at 50 GB/s", _FORTY_EIGHT),
        Case("another cluster", _a_cluster, points=2, hidden=True, fixed=_CLUSTERS),
    ],
    idea="The same ranks stand on two grids, one with tp, cp, dp, pp and one with etp, ep, edp, pp. Which grid answers "
    "which question?",
    hint="dp = world / (tp * cp * pp); edp = world / (etp * ep * pp); rank 0's dp-cp group goes in steps of tp and has "
    "n = dp * cp ranks; the time is 2 * gigabytes * (n - 1) / n / gb_per_second.",
)  # fmt: skip
