# the chosen by their places, gathered and put back
import torch


def choose(scores, bias, k):
    places = torch.argsort(scores + bias, dim=1, descending=True)[:, :k]
    kept = scores.gather(1, places)
    kept = kept / kept.sum(1, keepdim=True)
    map = torch.zeros(scores.shape, dtype=torch.bool)
    for row, at in zip(map, places):
        row[at] = True
    return torch.zeros_like(scores).scatter(1, places, kept), map


def move_bias(bias, counts, rate):
    share = counts.sum() / len(counts)
    up, down = (counts < share).to(bias.dtype), (counts > share).to(bias.dtype)
    return bias + rate * up - rate * down
