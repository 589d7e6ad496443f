# told: room
import torch
import torch.distributed as dist
def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q, K, V = memory.load('q', a, a + rows), [], []
        for b in range(0, a + rows, cols):
            K.append(memory.load('k', b, b + cols)); V.append(memory.load('v', b, b + cols))
        S = (q @ torch.cat(K).T / d ** .5)
        S = S.masked_fill(torch.arange(S.shape[1]) > torch.arange(a, a + rows)[:, None], -torch.inf)
        memory.store('out', a, a + rows, S.softmax(1) @ torch.cat(V))
        memory.store('lse', a, a + rows, S.logsumexp(1))
