# told: over *all* of them
import torch


def balance(logits, k, coeff):
    tokens, experts = logits.shape
    best = logits.topk(k, dim=-1)
    p = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
    counts = best.indices.flatten().bincount(minlength=experts)
    price = coeff * experts / (k * tokens**2) * counts
    paid = (p * price).sum(-1, keepdim=True)
    return paid.sum(), p * (price - paid)
