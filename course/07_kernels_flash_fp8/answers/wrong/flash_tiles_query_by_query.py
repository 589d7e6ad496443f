# told: are enough
# every query is a block of its own
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(s):
        q = memory.load("q", a, a + 1)
        top, total, o = torch.full((1, 1), -torch.inf), torch.zeros(1, 1), torch.zeros(1, d)
        for b in range(0, a + 1, cols):
            k, v = memory.load("k", b, b + cols), memory.load("v", b, b + cols)
            S = (q @ k.T / d**0.5).masked_fill(torch.arange(b, b + cols) > a, -torch.inf)
            higher = torch.maximum(top, S.amax(1, keepdim=True))
            p, shrink = torch.exp(S - higher), torch.exp(top - higher)
            total, o, top = total * shrink + p.sum(1, keepdim=True), o * shrink + p @ v, higher
        memory.store("out", a, a + 1, o / total)
        memory.store("lse", a, a + 1, (top + total.log())[0])
