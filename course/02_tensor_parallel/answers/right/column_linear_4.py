# a functional collective in the backward pass
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return funcol.all_reduce(grad.contiguous(), "sum", ctx.tp.group).clone(), None


def column_linear(x, weight, bias, tp):
    return F.linear(Copy.apply(x, tp), weight, bias)
