# told: exp(0) is 1
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return (logits * m).softmax(-1) * m, m
