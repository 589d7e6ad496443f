# told: changed places
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    groups = wk.shape[0] // d
    by_group = [w.unflatten(0, (groups, -1)) for w in (wq, wv, wk)]
    return torch.cat(by_group, dim=1).flatten(0, 1).chunk(tp_size)[tp_rank]
