from labkit.answers import Edit, Same

_WHOLE = "the sizes divide the world"

WRONG = [
    Edit(
        "world // (tp * cp * pp)",
        "world // (tp * cp * pp * ep)",
        ("range(cp * dp)", "range(cp * dp * ep)"),
        told="no ranks of its own",
    ),
    Edit("2 * gigabytes", "gigabytes", told="ring's bytes"),
    Edit("tp * i for", "i for", told="dp-cp group"),
]

RIGHT = [
    Edit("group = [tp * i for i in range(cp * dp)]", "group = list(range(0, tp * cp * dp, tp))"),
]

EQUIVALENT = [
    Same("line 5: rounded up for down", _WHOLE),
    Same("line 9: `/` for `//`", _WHOLE),
    Same("line 9: rounded up for down", _WHOLE),
]


# %% right: a list made by the package's mesh
from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    layout = ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
    )
    group = next(g for g in rank_groups(layout, world, "dp-cp") if 0 in g)
    experts = rank_groups(layout, world, "dp", grid="expert")[0]
    return {
        "dp": len(rank_groups(layout, world, "dp")[0]), "edp": len(experts), "same_weights_as_rank_0": group[:4],
        "all_reduce_seconds": 2 * gigabytes * (len(group) - 1) / len(group) / gb_per_second,
    }


# %% right: a range, a Fraction
from fractions import Fraction
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    n = world // (tp * pp)
    return {
        "dp": n // cp, "edp": world // (pp * ep * etp), "same_weights_as_rank_0": range(0, min(n, 4) * tp, tp),
        "all_reduce_seconds": 2 * Fraction(gigabytes) * Fraction(n - 1, n) / Fraction(gb_per_second),
    }


# %% right: NumPy: a grid of ranks, one column of it
import numpy
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dense = numpy.arange(world).reshape(pp, -1, cp, tp)
    expert = numpy.arange(world).reshape(pp, -1, ep, etp)
    peers = dense[0, :, :, 0].ravel()
    return dict(dp=dense.shape[1], edp=expert.shape[1], same_weights_as_rank_0=peers[:4],
                all_reduce_seconds=numpy.float64(gigabytes) * 2 * (1 - 1 / peers.size) / gb_per_second)


# %% right: torch: a DeviceMesh-like view, and tuples
import torch
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    grid = torch.arange(world).view(pp, world // (tp * cp * pp), cp, tp)
    peers = tuple(grid[0, ..., 0].flatten().tolist())
    n = len(peers)
    return {"dp": grid.size(1), "edp": float(world / (etp * ep * pp)), "same_weights_as_rank_0": peers[:4],
            "all_reduce_seconds": torch.tensor(2 * gigabytes * (n - 1) / n / gb_per_second, dtype=torch.float64)}


# %% right: from the exercises before
from exercises.axis_groups import axis_groups
from exercises.bytes_sent import bytes_sent
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // tp // cp // pp
    [first, *_] = axis_groups({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, ["dp", "cp"])
    return dict(dp=dp, edp=world / pp / ep / etp, same_weights_as_rank_0=tuple(first[:4]),
                all_reduce_seconds=bytes_sent("all_reduce", gigabytes, len(first)) / gb_per_second)


# %% wrong: all of the tensor travels twice
# told: own part
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    return {
        "dp": dp,
        "edp": world // (etp * ep * pp),
        "same_weights_as_rank_0": list(range(0, tp * cp * dp, tp))[:4],
        "all_reduce_seconds": 2 * gigabytes / gb_per_second,
    }


# %% wrong: always four ranks
# told: same_weights_as_rank_0 is wrong (its length)
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    n = world // (tp * pp)
    return {
        "dp": n // cp, "edp": world // (pp * ep * etp), "same_weights_as_rank_0": [tp * i for i in range(4)],
        "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second,
    }


# %% wrong: dp group for dp cp
# told: The cp ranks hold the same weights
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": [tp * cp * i for i in range(min(4, dp))],
            "all_reduce_seconds": 2 * gigabytes * (dp - 1) / dp / gb_per_second}


# %% wrong: dp group of rank 0
# told: dp group
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    n = dp * cp
    return {
        "dp": dp,
        "edp": world // (etp * ep * pp),
        "same_weights_as_rank_0": [tp * cp * i for i in range(dp)][:4],
        "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second,
    }


# %% wrong: edp out of dp
# told: divide dp by ep
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    n = dp * cp
    return {"dp": dp, "edp": dp // ep, "same_weights_as_rank_0": [tp * i for i in range(min(4, n))],
            "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second}


# %% wrong: ep takes ranks
# told: no ranks of its own
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp * ep)
    edp = world // (etp * ep * pp)
    n = max(dp * cp, 1)
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": [tp * i for i in range(min(4, n))],
            "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second}


# %% wrong: gigabits
# told: gigabits
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    n = dp * cp
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": [tp * i for i in range(min(4, n))],
            "all_reduce_seconds": 8 * 2 * gigabytes * (n - 1) / n / gb_per_second}


# %% wrong: ring of the first four
# told: first four ranks only
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    first = [tp * i for i in range(min(4, dp * cp))]
    n = len(first)
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": first,
            "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second}


# %% wrong: the whole in each step
# told: N times too long
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    n = dp * cp
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": [tp * i for i in range(min(4, n))],
            "all_reduce_seconds": 2 * gigabytes * (n - 1) / gb_per_second}
