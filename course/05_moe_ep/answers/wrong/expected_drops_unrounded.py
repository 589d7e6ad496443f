# told: not rounded up
import math

def expected_drops(tokens, experts, k, factor):
    C = tokens * k / experts * factor
    p = k / experts
    over = sum(max(0, n - C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1))
    return {"capacity": math.ceil(C), "dropped": experts * over / (k * tokens)}
