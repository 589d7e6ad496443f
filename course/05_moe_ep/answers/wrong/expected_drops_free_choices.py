# told: T trials
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens * k / experts * factor)
    p, N = 1 / experts, k * tokens
    over = sum((n - C) * math.comb(N, n) * p**n * (1 - p) ** (N - n) for n in range(C + 1, N + 1))
    return {"capacity": C, "dropped": experts * over / N}
