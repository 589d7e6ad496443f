# told: first four ranks only
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    first = [tp * i for i in range(min(4, dp * cp))]
    n = len(first)
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": first,
            "all_reduce_seconds": 2 * gigabytes * (n - 1) / n / gb_per_second}
