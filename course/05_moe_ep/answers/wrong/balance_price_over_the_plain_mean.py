# told: plain mean of all prices
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    c = coeff * E / (k * T * T) * n
    return (p * c).sum(), p * (c - c.mean())
