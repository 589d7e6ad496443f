# told: one for each query
import torch


def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = wk.shape[0] // d
    per = wq.shape[0] // d // g
    k = wk.view(g, 1, d, -1).expand(g, per, d, -1)
    v = wv.view(g, 1, d, -1).expand(g, per, d, -1)
    packed = torch.stack([wq.view(g, per, d, -1), k, v], 2).reshape(-1, wq.shape[1])
    return packed.chunk(tp_size)[tp_rank]
