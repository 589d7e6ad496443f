# told: Only the weights decide
import torch

def limit(probs, map, capacity):
    first = torch.zeros_like(map).scatter(1, probs.argmax(1, keepdim=True), True) & map
    key = torch.where(map, probs + 10 * first, -torch.inf)
    at = key.topk(min(capacity, len(map)), 0).indices
    keep = torch.zeros_like(map).scatter(0, at, True) & map
    return probs * keep, keep
