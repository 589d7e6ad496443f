# told: not [T, E]
import torch


def route(x, weight, k):
    best = (x.float() @ weight.float().T).topk(k)
    return best.values.softmax(-1), best.indices
