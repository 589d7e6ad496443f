# told: The cp ranks hold the same weights
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    edp = world // (etp * ep * pp)
    return {"dp": dp, "edp": edp, "same_weights_as_rank_0": [tp * cp * i for i in range(min(4, dp))],
            "all_reduce_seconds": 2 * gigabytes * (dp - 1) / dp / gb_per_second}
