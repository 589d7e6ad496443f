# told: groups are dealt out
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    packed = torch.cat([wq.view(g, per, d, -1), wk.view(g, 1, d, -1), wv.view(g, 1, d, -1)], 1)
    return packed[tp_rank::tp_size].reshape(-1, wq.shape[1])
