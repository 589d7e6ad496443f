import math

def expected_drops(tokens, experts, k, factor):
    """E max(n - C, 0) is the sum over c >= C of P(n > c)."""
    C = -int(-(tokens * k * factor) // experts)
    p = k / experts
    pmf = [math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1)]
    lost = sum(sum(pmf[c + 1 :]) for c in range(C, tokens))
    return {"capacity": C, "dropped": lost / (tokens * p)}
