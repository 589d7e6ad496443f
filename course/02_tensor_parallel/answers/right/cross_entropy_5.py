# autograd does the gradient, through the conjugate pair
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def cross_entropy(logits, target, tp):
    n = logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp.group)
    z = logits - top[..., None]
    local = target - tp.rank * n
    own = (local >= 0) & (local < n)
    picked = z.gather(-1, local.clamp(0, n - 1)[..., None])[..., 0] * own
    both = reduce_from_region(torch.stack((z.exp().sum(-1), picked)), tp)
    return both[0].log() - both[1]
