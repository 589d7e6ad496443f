# told: a loss of counts alone
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    n = torch.bincount(logits.topk(k).indices.flatten(), minlength=E).to(p.dtype)
    share = n / (k * T)
    c = coeff * E / (k * T * T) * n
    return coeff * E * (share**2).sum(), p * (c - (p @ c)[:, None])
