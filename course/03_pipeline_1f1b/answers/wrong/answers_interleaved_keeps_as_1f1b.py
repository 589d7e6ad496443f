# told: warms up otherwise than in plain 1F1B
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }
