# told: still gets a gradient
import torch

def limit(probs, map, capacity):
    key = torch.where(map, probs, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs - (probs * ~keep).detach(), keep
