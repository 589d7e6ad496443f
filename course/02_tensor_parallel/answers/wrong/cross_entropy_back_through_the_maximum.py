# told: goes back through the maximum
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region

def cross_entropy(logits, target, tp):
    n = logits.shape[-1]
    lo = tp.rank * n
    mine = (target >= lo) & (target < lo + n)
    local = torch.where(mine, target - lo, 0)
    top = logits.amax(-1).clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
    z = logits - top.unsqueeze(-1)
    total = reduce_from_region(z.exp().sum(-1), tp)
    hit = reduce_from_region(z.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine, tp)
    return total.log() - hit
