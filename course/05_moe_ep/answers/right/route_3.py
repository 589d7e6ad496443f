# in double, token by token
import torch
def route(x, weight, k):
    probs, map = [], []
    for row in x:
        logits = weight.double() @ row.double()
        m = torch.zeros(len(logits), dtype=torch.bool)
        m[logits.argsort(descending=True)[:k]] = True
        e = (logits - logits.max()).exp() * m
        probs.append((e / e.sum()).float())
        map.append(m)
    return torch.stack(probs), torch.stack(map)
