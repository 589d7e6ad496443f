# other formulas for every number
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    keep = p if v == 1 else 2 * p - 1 + (v - 1) * p
    fewest = math.ceil(20 * (p - 1) / v)
    fewest += -fewest % p if v > 1 else 0
    chunk = kept_bytes_per_token_and_layer * tokens * layers / (p * v)
    return dict(idle_share=(p - 1) / (p - 1 + v * m), microbatches_for_5_percent=fewest,
                kept_bytes_on_rank_0=min(keep, m * v) * chunk, bytes_between_ranks=4 * hidden * tokens * m * (p * v - 1))
