# told: largest over ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    lo = tp.rank * n
    mine = (ids >= lo) & (ids < lo + n)
    out = weight[torch.where(mine, ids - lo, 0)] * mine.unsqueeze(-1)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=tp.group)
    return out
