# told: 
import torch
import torch.distributed._functional_collectives as funcol


def column_backward(dy, x, weight, tp):
    dx = funcol.all_reduce(dy @ weight, "sum", tp.group) + 0
    return dx, torch.einsum("sbo,sbi->oi", dy, x)
