# told: consecutive query heads
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups = wk.shape[0] // d
    q, k, v = (w.unflatten(0, (-1, d)) for w in (wq, wk, wv))
    by_group = [torch.cat([q[g::groups], k[g : g + 1], v[g : g + 1]]) for g in range(groups)]
    return torch.cat(by_group).flatten(0, 1).chunk(tp_size)[tp_rank]
