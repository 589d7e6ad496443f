# told: Each *token* chooses
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    at = logits.topk(k, 0).indices
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(0, at, True)
    return logits.masked_fill(~m, -torch.inf).softmax(-1).nan_to_num(), m
