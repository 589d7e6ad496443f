# token by token, a tuple turned round
import torch


def balance(logits, k, coeff):
    T, E = logits.shape
    hot = torch.nn.functional.one_hot(logits.topk(k, sorted=False).indices, E).sum((0, 1)).to(logits)
    price = coeff * E * hot / k / T / T
    loss, rows = 0.0, []
    for p in logits.softmax(1).unbind():
        loss = loss + torch.dot(p, price)
        rows.append(p * price - p * torch.dot(p, price))
    return [loss, torch.stack(rows)]
