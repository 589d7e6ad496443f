# told:
# the normal distribution in place of the binomial
import math


def expected_drops(tokens, experts, k, factor):
    p, mean = k / experts, tokens * k / experts
    capacity = math.ceil(mean * factor)
    sigma = math.sqrt(tokens * p * (1 - p))
    z = (capacity - mean) / sigma
    density, above = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), 0.5 * math.erfc(z / math.sqrt(2))
    return {"capacity": capacity, "dropped": sigma * (density - z * above) / mean}
