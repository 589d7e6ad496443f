# a search for the fewest; everything else by its definition
from fractions import Fraction
from itertools import count
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    step = p if v > 1 else 1
    ahead = 2 * (p - 1) + (v - 1) * p if v > 1 else p - 1
    chunk = Fraction(layers, p * v) * tokens * kept_bytes_per_token_and_layer
    return {
        "idle_share": Fraction(p - 1, v * m + p - 1),
        "microbatches_for_5_percent": next(n for n in count(step, step) if Fraction(p - 1, v * n) <= Fraction(1, 20)),
        "kept_bytes_on_rank_0": min(ahead + 1, v * m) * chunk,
        "bytes_between_ranks": sum(2 * 2 * tokens * hidden * (p * v - 1) for _ in range(m)),
    }
