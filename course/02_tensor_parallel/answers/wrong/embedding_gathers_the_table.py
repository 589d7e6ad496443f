# told: never travels
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def embedding(ids, weight, tp):
    whole = c.gather_from_sequence_region(weight, tp, reduce_gradient=False)
    return F.embedding(ids, whole)
