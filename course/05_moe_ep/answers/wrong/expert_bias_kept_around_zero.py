# told: bias
# the mean of the biases is taken off after every step
import torch


def choose(scores, bias, k):
    map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, (scores + bias).topk(k, dim=-1).indices, True)
    kept = scores * map
    return kept / kept.sum(-1, keepdim=True), map


def move_bias(bias, counts, rate):
    counts = counts.float()
    moved = bias + rate * (counts.mean() - counts).sign()
    return moved - moved.mean()
