# told: same_weights_as_rank_0 is wrong (its length)
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    n = world // (tp * pp)
    return {
        "dp": n // cp, "edp": world // (pp * ep * etp), "same_weights_as_rank_0": [tp * i for i in range(4)],
        "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second,
    }
