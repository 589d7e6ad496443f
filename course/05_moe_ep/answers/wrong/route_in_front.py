# told: column of a weight is its expert
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    top = logits.topk(k)
    probs = torch.zeros_like(logits)
    probs[:, :k] = top.values.softmax(-1)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, top.indices, True)
