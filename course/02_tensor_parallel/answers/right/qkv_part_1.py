# group by group in a loop
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = len(wk) // d
    n = len(wq) // d // g
    rows = []
    for i in range(g):
        rows += [wq[i * n * d : (i + 1) * n * d], wk[i * d : (i + 1) * d], wv[i * d : (i + 1) * d]]
    packed = torch.cat(rows)
    size = len(packed) // tp_size
    return packed[tp_rank * size : (tp_rank + 1) * size]
