import torch

def balance(logits, k, coeff):
    T, E = logits.shape
    n = torch.zeros(E, dtype=logits.dtype).index_add(0, logits.topk(k).indices.flatten(), torch.ones(T * k, dtype=logits.dtype))

    def loss(z):
        return coeff * E / (k * T * T) * (n * z.softmax(-1).sum(0)).sum()

    value, back = torch.func.vjp(loss, logits)
    return value, back(torch.ones_like(value))[0]
