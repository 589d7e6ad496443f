import torch

def route(x, weight, k):
    logits = torch.einsum("th,eh->te", x.to(torch.float32), weight.to(torch.float32))
    left, taken = logits.clone(), []
    for _ in range(k):
        best = left.argmax(-1, keepdim=True)
        taken.append(best)
        left = left.scatter(1, best, -torch.inf)
    at = torch.cat(taken, 1)
    w = torch.exp(logits.gather(1, at) - logits.max(-1, keepdim=True).values.detach())
    w = w / w.sum(-1, keepdim=True)
    probs = torch.zeros_like(logits).scatter(1, at, w)
    return probs, torch.zeros_like(logits).scatter(1, at, 1).bool()
