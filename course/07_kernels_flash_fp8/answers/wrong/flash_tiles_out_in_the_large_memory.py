# told: is loaded | are stored
# o and lse go back to the large memory after each block of keys
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load("q", a, a + rows)
        memory.store("out", a, a + rows, torch.zeros(rows, d))
        memory.store("lse", a, a + rows, torch.full((rows,), -torch.inf))
        for b in range(0, a + rows, cols):
            o, lse = memory.load("out", a, a + rows), memory.load("lse", a, a + rows)
            S = q @ memory.load("k", b, b + cols).T / d**0.5
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -torch.inf)
            new = torch.logaddexp(lse, S.logsumexp(1))
            at = new.nan_to_num(neginf=0.0)[:, None]
            memory.store("out", a, a + rows, o * (lse[:, None] - at).exp() + (S - at).exp() @ memory.load("v", b, b + cols))
            memory.store("lse", a, a + rows, new)
