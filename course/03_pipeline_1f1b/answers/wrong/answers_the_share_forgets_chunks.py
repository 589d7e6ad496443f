# told: idle_share
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    ahead = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    few = next(n for n in range(1, 10**5) if 20 * (p - 1) <= v * n and (v == 1 or n % p == 0))
    return {
        "idle_share": (p - 1) / (m + p - 1),
        "microbatches_for_5_percent": few,
        "kept_bytes_on_rank_0": min(m * v, ahead + 1) * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 4 * (p * v - 1) * m * tokens * hidden,
    }
