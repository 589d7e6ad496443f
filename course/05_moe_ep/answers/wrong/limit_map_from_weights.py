# told:
# who is kept is read off the weights: a weight of 0 is taken for a token that was dropped
import torch


def limit(probs, map, capacity):
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True)
    left = probs * torch.zeros_like(map).scatter(0, order[:capacity], True) * map
    return left, left > 0
