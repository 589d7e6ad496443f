# told: look at the backward pass alone
import torch
import torch.distributed as dist


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        z = logits - highest.unsqueeze(-1)
        local = target - tp.rank * n
        own = (local >= 0) & (local < n)
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        picked = z.gather(-1, local).squeeze(-1) * own
        sums = torch.stack([picked, z.exp().sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        picked, partition = sums
        ctx.save_for_backward(z.exp() / partition.unsqueeze(-1), local, own)
        return partition.log() - picked

    @staticmethod
    def backward(ctx, dloss):
        softmax, local, own = ctx.saved_tensors
        dz = softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))
        return dz * dloss.unsqueeze(-1) / dloss.numel(), None, None


def cross_entropy(logits, target, tp):
    return VocabParallelCrossEntropy.apply(logits, target, tp)
