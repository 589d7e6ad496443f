# a hook on x's copy; einsum; the name imported
import torch
from torch.distributed import all_reduce


def column_linear(x, weight, bias, tp):
    x = x * 1.0

    def summed(grad):
        grad = grad.contiguous().clone()
        all_reduce(grad, group=tp.group)
        return grad

    x.register_hook(summed)
    y = torch.einsum("sbi,oi->sbo", x, weight)
    return y if bias is None else y + bias
