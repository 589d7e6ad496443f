# autograd through g; the max needs no gradient
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def cross_entropy(logits, target, tp):
    n = logits.shape[-1]
    m = logits.detach().amax(-1)
    dist.all_reduce(m, op=dist.ReduceOp.MAX, group=tp.group)
    z = logits - m.unsqueeze(-1)
    i = target - tp.rank * n
    own = (i >= 0) & (i < n)
    picked = z.gather(-1, i.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1) * own
    return reduce_from_region(z.exp().sum(-1), tp).log() - reduce_from_region(picked, tp)
