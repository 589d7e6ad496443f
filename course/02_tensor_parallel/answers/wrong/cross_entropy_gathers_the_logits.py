# told: Three numbers a token
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def cross_entropy(logits, target, tp):
    whole = gather_from_region(logits, tp)
    loss = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction='none')
    return loss.view_as(target)
