# fractions
from fractions import Fraction


def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):
    router, expert = experts * h, h * f + h * f + f * h
    busy = 2 * Fraction(expert) * k * tokens / Fraction(flops)
    travel = Fraction(2 * k * tokens * h * element_size) * Fraction(ep - 1, ep) / Fraction(bandwidth)
    return {
        "compute_over_travel": float(busy / travel),
        "allgather_over_alltoall": float(Fraction(ep, k)),
        "rows_of_an_expert": float(Fraction(tokens * k * ep, experts)),
        "copies_of_an_expert": dp // ep,
        "active_parameters": router + k * expert,
        "parameters": router + experts * expert,
    }
