# what is kept, by math.comb
import math
def expected_drops(tokens, experts, k, factor):
    p, C = k / experts, -int(-tokens * k * factor // experts)
    kept = sum(min(n, C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1))
    return {'capacity': C, 'dropped': 1 - kept / (tokens * p)}
