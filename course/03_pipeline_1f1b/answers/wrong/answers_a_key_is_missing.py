# told: microbatches_for_5_percent
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    idle = (p - 1) / (v * m)
    ahead = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    return {
        "idle_share": idle / (1 + idle),
        "kept_bytes_on_rank_0": min(m * v, ahead + 1) * layers // (p * v) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 4 * (p * v - 1) * m * tokens * hidden,
    }
