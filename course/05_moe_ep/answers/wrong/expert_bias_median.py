# told: with their median
import torch

def choose(scores, bias, k):
    at = (scores + bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    s = scores * m
    return s / s.sum(1, keepdim=True), m

def move_bias(bias, counts, rate):
    return bias + rate * torch.sign(counts.median() - counts)
