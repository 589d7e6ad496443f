# told: divided by the tokens once more
import torch


def balance(logits, k, coeff):
    tokens, experts = logits.shape
    p = logits.softmax(-1)
    counts = logits.topk(k, dim=-1).indices.flatten().bincount(minlength=experts)
    price = coeff * experts / (k * tokens**2) * counts
    paid = (p * price).sum(-1, keepdim=True)
    return paid.sum(), p * (price - paid) / tokens
