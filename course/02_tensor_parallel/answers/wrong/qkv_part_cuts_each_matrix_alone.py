# told: another order
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    return torch.cat([w.chunk(tp_size)[tp_rank] for w in (wq, wk, wv)])
