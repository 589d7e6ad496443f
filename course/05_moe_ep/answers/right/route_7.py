# the softmax over all experts, of which the chosen ones are scaled to sum to 1
import torch


def route(x, weight, k):
    logits = x.float() @ weight.float().T
    best = logits.topk(k, dim=-1).indices
    map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
    p = logits.softmax(-1) * map
    return p / p.sum(-1, keepdim=True), map
