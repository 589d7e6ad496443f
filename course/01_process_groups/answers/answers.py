from labkit.answers import Edit, Same

_WHOLE = "the sizes divide the world"
_EP = "dp: you divide by ep. Expert parallelism takes no ranks of its own."
_CP = "same_weights_as_rank_0: this is rank 0's dp group. The cp ranks hold the same weights, too."
_TIME = "2 * gigabytes * (len(group) - 1) / len(group)"

WRONG = [
    Edit("world // (tp * cp * pp)", "world // (tp * cp * pp * ep)", mistake=_EP),
    Edit("cp * pp)\n", "cp * pp)\n    n = cp * dp\n", ("world // (tp * cp * pp)", "world // (tp * cp * pp * ep)"),
         ("n = cp * dp", "n = cp * dp * ep"), ("range(cp * dp)", "range(n)"),
         mistake=_EP),
    Edit("(etp * ep * pp)", "(ep * pp)", mistake="edp: you leave out etp, which is an axis of the expert grid."),
    Edit("(etp * ep * pp)", "(tp * ep * pp)", mistake="edp: you divide by tp. The expert grid has etp in its place."),
    Edit("world // (etp * ep * pp)", "dp // ep",
         mistake="edp: you divide dp by ep. The expert grid lays out all tp * cp * dp ranks."),
    Edit("tp * i for", "i for",
         mistake="same_weights_as_rank_0: neighbours of rank 0 are its tp group. They hold other weights; asked is its "
                 "dp-cp group."),
    Edit("group[:4]", "[tp * cp * i for i in range(dp)][:4]", mistake=_CP),
    Edit("[tp * i for i in range(cp * dp)]", "[tp * cp * i for i in range(dp)]", mistake=_CP),
    Edit(_TIME, _TIME[4:],
         mistake="all_reduce_seconds: the time of one half of the ring's bytes. An all-reduce has two phases."),
    Edit(_TIME, "2 * gigabytes",
         mistake="all_reduce_seconds: a rank does not send its own part. In each phase N-1 of N parts travel."),
    Edit(_TIME, "8 * " + _TIME,
         mistake="all_reduce_seconds: eight times too long. The link sends gigabytes per second, not gigabits."),
    Edit(_TIME, _TIME.replace("group)", "group[:4])"),
         mistake="all_reduce_seconds: your ring has the first four ranks only. The whole dp-cp group sums its "
                 "gradients."),
    Edit(_TIME, "2 * gigabytes * (dp - 1) / dp",
         mistake="all_reduce_seconds: your ring has the ranks of the dp group. The dp-cp group is larger."),
    Edit("group[:4]", "[tp * i for i in range(4)]", told="same_weights_as_rank_0 is wrong (its length)"),
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


# %% right: from the exercises before
from exercises.axis_groups import axis_groups
from exercises.bytes_sent import bytes_sent
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // tp // cp // pp
    [first, *_] = axis_groups({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, ["dp", "cp"])
    return dict(dp=dp, edp=world / pp / ep / etp, same_weights_as_rank_0=tuple(first[:4]),
                all_reduce_seconds=bytes_sent("all_reduce", gigabytes, len(first)) / gb_per_second)
