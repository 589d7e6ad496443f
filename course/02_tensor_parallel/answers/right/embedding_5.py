# a zero row in front of the table; a functional collective
import torch
import torch.distributed._functional_collectives as funcol


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        return funcol.all_reduce(x, "sum", tp.group).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def embedding(ids, weight, tp):
    local = (ids - tp.rank * weight.shape[0] + 1).clamp(0, weight.shape[0] + 1) % (weight.shape[0] + 1)
    table = torch.cat((torch.zeros_like(weight[:1]), weight))
    return Reduce.apply(table[local], tp)
