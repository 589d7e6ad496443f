# local logsumexp, gathered; the target's logit summed; functional collectives
import torch
import torch.distributed._functional_collectives as funcol


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        n = logits.shape[-1]
        lses = funcol.all_gather_tensor(logits.logsumexp(-1)[None], 0, tp.group)
        lse = lses.clone().logsumexp(0)
        ids = torch.arange(tp.rank * n, tp.rank * n + n)
        hot = target[..., None] == ids
        picked = funcol.all_reduce((logits * hot).sum(-1), "sum", tp.group)
        ctx.save_for_backward((logits - lse[..., None]).exp() - hot.to(logits.dtype))
        return lse - picked.clone()

    @staticmethod
    def backward(ctx, dloss):
        [dz] = ctx.saved_tensors
        return dz * dloss[..., None], None, None


def cross_entropy(logits, target, tp):
    return Loss.apply(logits, target, tp)
