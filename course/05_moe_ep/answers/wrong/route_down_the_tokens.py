# told: runs over the tokens
import torch

def route(x, weight, k):
    logits = x.float() @ weight.float().T
    m = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return logits.masked_fill(~m, -torch.inf).softmax(0).nan_to_num(), m
