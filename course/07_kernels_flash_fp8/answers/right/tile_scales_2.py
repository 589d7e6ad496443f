# tile by tile, in Python
import math
import torch


def tile_scales(x, tile, top):
    M, N = -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])
    out = torch.ones(M, N)
    for i in range(M):
        for j in range(N):
            a = x[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]].abs().max().item()
            if a:
                out[i, j] = 2.0 ** min(math.floor(math.log2(top / a)), 127)
    return out
