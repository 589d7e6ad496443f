# told: gigabits
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    n = dp * cp
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": [tp * i for i in range(min(4, n))],
            "all_reduce_seconds": 8 * 2 * gigabytes * (n - 1) / n / gb_per_second}
