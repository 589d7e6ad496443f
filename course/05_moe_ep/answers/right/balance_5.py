# torch.func in place of the formula
import torch


def balance(logits, k, coeff):
    T, E = logits.shape
    n = torch.zeros_like(logits).scatter(1, logits.topk(k).indices, 1.0).sum(0)
    grad, loss = torch.func.grad_and_value(lambda x: coeff * E / (k * T * T) * (x.softmax(-1).sum(0) * n).sum())(logits)
    return loss, grad
