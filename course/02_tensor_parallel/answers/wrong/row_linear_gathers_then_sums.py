# told: an all-reduce
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def row_linear(x, weight, bias, tp):
    parts = gather_from_region(F.linear(x, weight), tp)
    y = sum(parts.chunk(tp.size, -1))
    return y if bias is None else y + bias
