# maximum and sum of every rank, and the target's logit, in one gather
import torch
import torch.distributed as dist


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        top = logits.amax(-1)
        local = target - tp.rank * n
        own = (local >= 0) & (local < n)
        local = local.clamp(0, n - 1).unsqueeze(-1)
        picked = torch.where(own, logits.gather(-1, local).squeeze(-1), 0.0)
        mine = torch.stack((top, (logits - top[..., None]).exp().sum(-1), picked))
        every = [torch.empty_like(mine) for _ in range(tp.size)]
        dist.all_gather(every, mine, group=tp.group)
        tops, sums, picks = torch.stack(every, 1)
        lse = (tops + sums.log()).logsumexp(0)
        ctx.save_for_backward((logits - lse[..., None]).exp(), local, own)
        return lse - picks.sum(0)

    @staticmethod
    def backward(ctx, dloss):
        p, local, own = ctx.saved_tensors
        return p.scatter_add(-1, local, -own[..., None].to(p.dtype)) * dloss[..., None], None, None


def cross_entropy(logits, target, tp):
    return Loss.apply(logits, target, tp)
