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
