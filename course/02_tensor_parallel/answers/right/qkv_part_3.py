# all heads in one tensor, taken in another order
import torch
def qkv_part(wq, wk, wv, d, tp_rank, tp_size):
    g, h = len(wk) // d, wk.shape[1]
    a = len(wq) // d
    heads = torch.cat([wq, wk, wv]).view(-1, d, h)
    order = [i for j in range(g) for i in [*range(j * a // g, (j + 1) * a // g), a + j, a + g + j]]
    return heads[order].reshape(-1, h).tensor_split(tp_size)[tp_rank].clone()
