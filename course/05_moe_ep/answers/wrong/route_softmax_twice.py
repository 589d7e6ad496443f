# told: softmax of a softmax
# the softmax over all, of its k largest values a softmax again
import torch


def route(x, weight, k):
    p = (x.float() @ weight.float().T).softmax(-1)
    best = p.topk(k, dim=-1)
    probs = torch.zeros_like(p).scatter(1, best.indices, best.values.softmax(-1))
    return probs, torch.zeros_like(p, dtype=torch.bool).scatter(1, best.indices, True)
