# a product with one-hot rows
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    lo = tp.rank * n
    mine = (ids >= lo) & (ids < lo + n)
    hot = (ids.unsqueeze(-1) - lo == torch.arange(n)).to(weight.dtype)
    return reduce_from_region(hot @ weight, tp)
