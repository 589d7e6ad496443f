# rows by remainder, multiplied by zero where they are foreign
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def embedding(ids, weight, tp):
    n = len(weight)
    own = (ids // n) == tp.rank
    rows = weight[ids % n] * own.unsqueeze(-1)
    return reduce_from_region(rows, tp)
