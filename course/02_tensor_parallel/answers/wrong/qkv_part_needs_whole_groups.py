# told: part of a group
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups = wk.shape[0] // d
    mine = max(1, groups // tp_size)
    n = wq.shape[0] // groups
    rows = []
    for g in range(tp_rank * mine, min(groups, (tp_rank + 1) * mine)):
        rows += [wq[g * n : (g + 1) * n], wk[g * d : (g + 1) * d], wv[g * d : (g + 1) * d]]
    return torch.cat(rows) if rows else wq[:0]
