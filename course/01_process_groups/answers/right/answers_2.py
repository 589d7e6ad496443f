# a range, a Fraction
from fractions import Fraction
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    n = world // (tp * pp)
    return {
        "dp": n // cp, "edp": world // (pp * ep * etp), "same_weights_as_rank_0": range(0, min(n, 4) * tp, tp),
        "all_reduce_seconds": 2 * Fraction(gigabytes) * Fraction(n - 1, n) / Fraction(gb_per_second),
    }
