# told: Row 0 of this rank's table
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    lo = tp.rank * n
    mine = (ids >= lo) & (ids < lo + n)
    out = weight[torch.where(mine, ids, 0)]
    return reduce_from_region(out * mine.unsqueeze(-1), tp)
