import torch

def limit(probs, map, capacity):
    keep = torch.zeros_like(map)
    for e in range(map.shape[1]):
        at = map[:, e].nonzero()[:, 0]
        best = probs.detach()[at, e].argsort(descending=True)[:capacity]
        keep[at[best], e] = True
    return probs * keep, keep
