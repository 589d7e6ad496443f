# told: only for the experts that it chose
import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    m = torch.zeros_like(p).scatter(1, logits.topk(k).indices, 1.0)
    c = coeff * E / (k * T * T) * m.sum(0)
    g = m * c
    return (p * g).sum(), p * (g - (p * g).sum(-1, keepdim=True))
