# told: predicted | room
# K and V are loaded once, and stay
import torch


def flash_tiles(memory, s, d, rows, cols):
    K, V = memory.load("k", 0, s), memory.load("v", 0, s)
    for first in range(0, s, rows):
        q, at = memory.load("q", first, first + rows), torch.arange(first, first + rows)[:, None]
        top, total, o = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for start in range(0, first + rows, cols):
            k, v = K[start : start + cols], V[start : start + cols]
            scores = (q @ k.T / d**0.5).masked_fill(torch.arange(start, start + cols) > at, -torch.inf)
            higher = torch.maximum(top, scores.amax(1, keepdim=True))
            p, shrink = torch.exp(scores - higher), torch.exp(top - higher)
            total, o, top = total * shrink + p.sum(1, keepdim=True), o * shrink + p @ v, higher
        memory.store("out", first, first + rows, o / total)
        memory.store("lse", first, first + rows, (top + total.log()).squeeze(1))
