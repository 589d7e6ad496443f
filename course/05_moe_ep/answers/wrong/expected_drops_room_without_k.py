# told: k of them for each token
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens / experts * factor)
    p = k / experts
    over = sum((n - C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(C + 1, tokens + 1))
    return {"capacity": C, "dropped": experts * over / (k * tokens)}
