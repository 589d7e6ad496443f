# told: own part
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    dp = world // (tp * cp * pp)
    return {
        "dp": dp,
        "edp": world // (etp * ep * pp),
        "same_weights_as_rank_0": list(range(0, tp * cp * dp, tp))[:4],
        "all_reduce_seconds": 2 * gigabytes / gb_per_second,
    }
