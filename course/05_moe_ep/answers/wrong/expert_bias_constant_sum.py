# told: it gets no gradient
import torch

def choose(scores, bias, k):
    at = (scores + bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    s = scores * m
    return s / s.sum(1, keepdim=True).detach(), m

def move_bias(bias, counts, rate):
    counts = counts.float()
    return bias + rate * torch.sign(counts.mean() - counts)
