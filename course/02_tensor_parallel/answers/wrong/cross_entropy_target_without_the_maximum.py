# told: the loss is not
import torch
import torch.distributed as dist


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        exps = (logits - highest.unsqueeze(-1)).exp()
        local = target - tp.rank * n
        own = (local >= 0) & (local < n)
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        sums = torch.stack([logits.gather(-1, local).squeeze(-1) * own, exps.sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        ctx.save_for_backward(exps / sums[1].unsqueeze(-1), local, own)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, dloss):
        softmax, local, own = ctx.saved_tensors
        dz = softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))
        return dz * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return Loss.apply(logits, target, tp)
