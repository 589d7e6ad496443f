# no autograd function: a hook on the gradient, and a detached correction
import torch
import torch.distributed as dist
def copy_to(x):
    y = x.view_as(x) if x.requires_grad else x
    def add(g):
        g = g.clone()
        dist.all_reduce(g)
        return g
    y.register_hook(add)
    return y
def reduce_from(x):
    total = x.detach().clone()
    dist.all_reduce(total)
    return x + (total - x.detach())
