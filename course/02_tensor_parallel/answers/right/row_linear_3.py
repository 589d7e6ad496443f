# the sum as a detached correction, in place of g
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def row_linear(x, weight, bias, tp):
    y = F.linear(x, weight)
    total = y.detach().clone()
    dist.all_reduce(total, group=tp.group)
    y = y + (total - y.detach())
    return y if bias is None else y + bias
