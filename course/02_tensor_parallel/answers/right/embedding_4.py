# a one-hot product
import torch
from minimegatron.comm.collectives import reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    mine = torch.arange(tp.rank * n, (tp.rank + 1) * n)
    return reduce_from_region((ids[..., None] == mine).to(weight.dtype) @ weight, tp)
