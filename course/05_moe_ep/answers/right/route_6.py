# k times the best of what is left
import torch


def route(x, weight, k):
    logits = (weight.float() @ x.float().T).T
    map = torch.zeros_like(logits).bool()
    for _ in range(k):
        best = logits.detach().masked_fill(map, -torch.inf).argmax(1)
        map = map | torch.nn.functional.one_hot(best, logits.shape[1]).bool()
    return torch.softmax(logits.masked_fill(~map, -torch.inf), dim=1), map
