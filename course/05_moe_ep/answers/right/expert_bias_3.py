# a loop that takes the best k; signs by torch.where
import torch


def choose(scores, bias, k):
    left, map = (scores + bias).clone(), torch.zeros_like(scores, dtype=torch.bool)
    rows = torch.arange(len(scores))
    for _ in range(k):
        best = left.argmax(1)
        map[rows, best] = True
        left[rows, best] = -torch.inf
    total = torch.einsum("te,te->t", scores, map.to(scores.dtype))
    return scores.masked_fill(~map, 0) / total.unsqueeze(1), map


def move_bias(bias, counts, rate):
    moved = bias.clone()
    moved += rate * torch.sign(counts.double().mean() - counts).to(bias.dtype)
    return moved
