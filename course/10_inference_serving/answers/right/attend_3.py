# page by page with the running softmax: no list of all keys
import math
import torch


def attend(q, k, v, keys, values, table, kept):
    n, d = q.shape
    size = keys.shape[1]
    for i in range(n):
        keys[table[(kept + i) // size], (kept + i) % size] = k[i]
        values[table[(kept + i) // size], (kept + i) % size] = v[i]
    most, mass, out = torch.full((n, 1), -math.inf), torch.zeros(n, 1), torch.zeros(n, d)
    for at, page in enumerate(table):
        first = at * size
        rows = min(size, kept + n - first)
        if rows <= 0:
            break
        scores = q @ keys[page, :rows].T / d**0.5
        places = torch.arange(first, first + rows)
        scores = scores.masked_fill(places > torch.arange(kept, kept + n)[:, None], -math.inf)
        new = torch.maximum(most, scores.amax(1, keepdim=True))
        weights = (scores - new).exp()
        scale = (most - new).exp()
        mass = mass * scale + weights.sum(1, keepdim=True)
        out = out * scale + weights @ values[page, :rows]
        most = new
    return out / mass
