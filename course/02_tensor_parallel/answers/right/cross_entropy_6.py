# logsumexp of each rank and the target's logit, gathered and put together
import torch
import torch.distributed as dist


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lse = torch.logsumexp(logits, -1)
        mine = torch.arange(tp.rank * n, (tp.rank + 1) * n)
        hot = target.unsqueeze(-1) == mine
        picked = logits.masked_fill(~hot, 0.0).sum(-1)
        both = torch.stack([lse, picked]).contiguous()
        each = both.new_empty(tp.size * 2, *lse.shape)
        dist.all_gather_into_tensor(each, both, group=tp.group)
        each = each.unflatten(0, (tp.size, 2))
        total = torch.logsumexp(each[:, 0], 0)
        ctx.save_for_backward((logits - total.unsqueeze(-1)).exp() - hot.to(logits.dtype))
        return total - each[:, 1].sum(0)

    @staticmethod
    def backward(ctx, dloss):
        (dz,) = ctx.saved_tensors
        return dz * dloss.unsqueeze(-1), None, None


def cross_entropy(logits, target, tp):
    return Loss.apply(logits, target, tp)
