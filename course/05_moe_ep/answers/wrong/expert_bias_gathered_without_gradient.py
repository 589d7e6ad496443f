# told: weights have no gradient
import torch


def choose(scores, bias, k):
    i = (scores + bias).topk(k, dim=-1).indices
    w = scores.gather(1, i).detach()
    probs = torch.zeros_like(scores).scatter(1, i, w / w.sum(1, keepdim=True))
    return probs, torch.zeros_like(scores, dtype=torch.bool).scatter(1, i, True)


def move_bias(bias, counts, rate):
    return bias + rate * (counts.float().mean() - counts).sign()
