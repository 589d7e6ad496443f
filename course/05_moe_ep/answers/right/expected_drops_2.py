# the distribution by repeated convolution
import math
import torch
def expected_drops(tokens, experts, k, factor):
    p, d = k / experts, torch.zeros(tokens + 1, dtype=torch.float64)
    d[0] = 1
    for _ in range(tokens):
        d = d * (1 - p) + torch.cat((torch.zeros(1), d[:-1])) * p
    C = math.ceil(tokens * k * factor / experts)
    n = torch.arange(tokens + 1)
    return {'capacity': C, 'dropped': ((n - C).clamp(min=0) * d).sum() * experts / (k * tokens)}
