# chunks of the three matrices, zipped
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g = len(wk) // d
    packed = torch.cat([torch.cat(p) for p in zip(wq.chunk(g), wk.chunk(g), wv.chunk(g))])
    return packed.view(tp_size, -1, packed.shape[1])[tp_rank]
