# by rank: how many weigh more, of equal ones those that come first
import torch
def limit(probs, map, capacity):
    p = probs.masked_fill(~map, -1)
    earlier = torch.arange(len(p))[:, None] > torch.arange(len(p))
    above = (p[None] > p[:, None]).sum(1) + ((p[None] == p[:, None]) & earlier[..., None]).sum(1)
    kept = map & (above < capacity)
    return probs.masked_fill(~kept, 0), kept
