# told: predicted | room
# a cache of tiles, filled by the first block of queries that needs them
import functools
import torch


def flash_tiles(memory, s, d, rows, cols):
    load = functools.cache(memory.load)
    for a in range(0, s, rows):
        q = load("q", a, a + rows)
        o, lse = torch.zeros(rows, d), torch.full((rows,), -torch.inf)
        for b in range(0, a + rows, cols):
            S = q @ load("k", b, b + cols).T / d**0.5
            S = S.masked_fill(torch.arange(b, b + cols) > torch.arange(a, a + rows)[:, None], -torch.inf)
            new = torch.logaddexp(lse, S.logsumexp(1))
            at = new.nan_to_num(neginf=0.0)[:, None]
            o, lse = o * (lse[:, None] - at).exp() + (S - at).exp() @ load("v", b, b + cols), new
        memory.store("out", a, a + rows, o)
        memory.store("lse", a, a + rows, lse)
