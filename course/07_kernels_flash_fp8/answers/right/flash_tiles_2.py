# from the last block of queries to the first, blocks of keys backwards, base two
import torch
import torch.distributed as dist
import math
def flash_tiles(memory, s, d, rows, cols):
    for a in reversed(range(0, s, rows)):
        q = memory.load('q', a, a + rows) * (math.log2(math.e) / d ** .5)
        m, l, o = torch.full((rows, 1), -1e30), 0.0, 0.0
        for b in reversed(range(0, a + rows, cols)):
            k, v = (memory.load(n, b, b + cols) for n in 'kv')
            seen = torch.arange(a, a + rows)[:, None] >= torch.arange(b, b + cols)
            S = torch.where(seen, q @ k.T, -torch.inf)
            n = torch.maximum(m, S.amax(1, True))
            p, c = torch.exp2(S - n), torch.exp2(m - n)
            l, o, m = l * c + p.sum(1, True), o * c + p @ v, n
        memory.store('out', a, a + rows, o / l)
        memory.store('lse', a, a + rows, ((m + torch.log2(l)) / math.log2(math.e)).flatten())
