# told: You gathered y
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_linear(x, weight, bias, tp):
    return gather_from_region(F.linear(copy_to_region(x, tp), weight, bias), tp)
