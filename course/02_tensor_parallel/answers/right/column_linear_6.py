# f as a hook on the gradient of a view
import torch
import torch.distributed as dist


def column_linear(x, weight, bias, tp):
    def summed(grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=tp.group)
        return total

    mine = x.view_as(x)
    if mine.requires_grad:
        mine.register_hook(summed)
    y = mine @ weight.t()
    return y if bias is None else y + bias
