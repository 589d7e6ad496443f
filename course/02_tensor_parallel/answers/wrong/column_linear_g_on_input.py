# told: You summed x
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x, weight, bias, tp):
    return F.linear(reduce_from_region(x, tp), weight, bias)
