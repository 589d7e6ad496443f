# told: mean of the ranks' shares
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        x = x.clone()
        dist.all_reduce(x, group=tp.group)
        return x / tp.size

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(F.linear(x, weight), tp)
    return y if bias is None else y + bias
