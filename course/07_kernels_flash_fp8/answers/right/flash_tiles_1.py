# merged pieces: each block of keys is a small attention
import torch
import torch.distributed as dist
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q = memory.load('q', a, a + rows)
        out, lse = torch.zeros(rows, d), torch.full((rows,), -torch.inf)
        for b in range(0, a + rows, cols):
            S = memory.load('k', b, b + cols) @ q.T / d ** .5
            hide = torch.arange(b, b + cols)[:, None] > torch.arange(a, a + rows)
            S = S.masked_fill(hide, -torch.inf).T
            l = torch.logsumexp(S, 1)
            new = torch.logaddexp(lse, l)
            p = torch.exp(S - new[:, None].nan_to_num(neginf=0.0))
            out = out * torch.exp(lse - new.nan_to_num(neginf=0.0))[:, None] + p @ memory.load('v', b, b + cols)
            lse = new
        memory.store('out', a, a + rows, out)
        memory.store('lse', a, a + rows, lse)
