# told: mean of the ranks' shares
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.tp.group)
        return grad / ctx.tp.size, None


def column_linear(x, weight, bias, tp):
    return F.linear(Copy.apply(x, tp), weight, bias)
