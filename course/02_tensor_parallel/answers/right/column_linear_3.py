# a hook on the gradient for f
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_linear(x, weight, bias, tp):
    x = x.view_as(x)
    def add(g):
        g = g.clone()
        dist.all_reduce(g, group=tp.group)
        return g
    x.register_hook(add)
    return F.linear(x, weight, bias)
