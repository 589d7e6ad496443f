# matmul, a coalescing-free async sum, the bias in place
import torch
from torch.distributed import ReduceOp, all_reduce


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        out = x.contiguous().clone()
        work = all_reduce(out, ReduceOp.SUM, tp.group, True)
        work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(torch.matmul(x, weight.mT), tp)
    if bias is not None:
        y = y.add(bias)
    return y
