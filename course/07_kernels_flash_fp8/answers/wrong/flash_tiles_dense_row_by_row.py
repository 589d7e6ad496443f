# told: room
# the tiles are gathered, and each query is done against all of its keys
import torch


def flash_tiles(memory, s, d, rows, cols):
    for a in range(0, s, rows):
        q, K, V = memory.load("q", a, a + rows), [], []
        for b in range(0, a + rows, cols):
            K.append(memory.load("k", b, b + cols))
            V.append(memory.load("v", b, b + cols))
        K, V = torch.cat(K), torch.cat(V)
        out, lse = [], []
        for i in range(rows):
            S = K[: a + i + 1] @ q[i] / d**0.5
            out.append(S.softmax(0) @ V[: a + i + 1])
            lse.append(S.logsumexp(0))
        memory.store("out", a, a + rows, torch.stack(out))
        memory.store("lse", a, a + rows, torch.stack(lse))
