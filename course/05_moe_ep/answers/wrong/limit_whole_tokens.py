# told: decides for itself
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    whole = (keep == map).all(-1, keepdim=True)
    keep = map & whole
    return probs * keep, keep
