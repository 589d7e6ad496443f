# a functional collective in a Function
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        return funcol.all_reduce(x, "sum", tp.group).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(F.linear(x, weight), tp)
    return y if bias is None else y + bias
