# told: one number for a whole block
import math
import torch
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        m, l, o = torch.full((rows, 1), -math.inf), torch.zeros(rows, 1), torch.zeros(rows, d)
        for b in range(0, a + rows, cols):
            S = q @ memory.load("k", b, b + cols).T / math.sqrt(d)
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -math.inf)
            new = torch.maximum(m, S.amax())
            P = torch.exp(S - new)
            shrink = torch.exp(m - new)
            l = l * shrink + P.sum(1, keepdim=True)
            o = o * shrink + P @ memory.load("v", b, b + cols)
            m = new
        memory.store("out", a, a + rows, o / l)
        memory.store("lse", a, a + rows, (m + l.log()).squeeze(1))
