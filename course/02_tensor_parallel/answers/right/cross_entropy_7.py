# each rank's logsumexp gathered
import torch
import torch.distributed as dist
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lo = tp.rank * n
        mine = (target >= lo) & (target < lo + n)
        local = torch.where(mine, target - lo, 0)
        own = logits.logsumexp(-1)
        parts = [torch.empty_like(own) for _ in range(tp.size)]
        dist.all_gather(parts, own, group=tp.group)
        total = torch.stack(parts).logsumexp(0)
        hit = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
        dist.all_reduce(hit, group=tp.group)
        ctx.save_for_backward((logits - total.unsqueeze(-1)).exp(), local, mine)
        return total - hit

    @staticmethod
    def backward(ctx, dloss):
        p, local, mine = ctx.saved_tensors
        grad = p.clone()
        grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(p.dtype).unsqueeze(-1))
        return grad * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return VocabParallelCrossEntropy.apply(logits, target, tp)
