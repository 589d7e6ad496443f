# told: a softmax of the scores
import torch

def choose(scores, bias, k):
    at = (scores + bias).topk(k).indices
    m = torch.zeros_like(scores, dtype=torch.bool).scatter(1, at, True)
    return scores.masked_fill(~m, -torch.inf).softmax(-1), m

def move_bias(bias, counts, rate):
    counts = counts.float()
    return bias + rate * torch.sign(counts.mean() - counts)
