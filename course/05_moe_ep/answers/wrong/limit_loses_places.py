# told: with the weight 0
import torch


def limit(probs, map, capacity):
    i = probs.topk(min(capacity, len(probs)), 0).indices
    keep = torch.zeros_like(map).scatter(0, i, True) & map
    return probs * keep, keep
