# functional collectives with their own gradients
import torch
import torch.distributed._functional_collectives as funcol


def gather_sequence(x, tp):
    return funcol.all_gather_tensor_autograd(x.contiguous(), 0, tp.group)


def reduce_scatter_sequence(x, tp):
    return funcol.reduce_scatter_tensor_autograd(x.contiguous(), "sum", 0, tp.group)
