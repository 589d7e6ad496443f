# all verdicts at once, the first rejection found in the list
import torch


def draw(weights, number):
    mass = weights.cumsum(0)
    return int((mass <= number * mass[-1]).sum())


def verify(p, q, proposed, u, v):
    k = len(proposed)
    at = torch.arange(k), torch.tensor(proposed, dtype=torch.long)
    rejected = (torch.tensor(u, dtype=p.dtype)[:k] * q[at] >= p[:k][at]).tolist()
    n = rejected.index(True) if True in rejected else k
    weights = p[k] if n == k else torch.relu(p[n] - q[n])
    return proposed[:n] + [draw(weights / weights.sum(), v[n])]
