# told: mean of quotients
import math

def expected_drops(tokens, experts, k, factor):
    C = math.ceil(tokens * k / experts * factor)
    p = k / experts
    return {"capacity": C, "dropped": sum((n - C) / n * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(C + 1, tokens + 1))}
