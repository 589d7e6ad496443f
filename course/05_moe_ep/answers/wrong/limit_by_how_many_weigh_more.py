# told: at most
# by rank: how many weigh more
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def limit(probs, map, capacity):
    p = probs.masked_fill(~map, -1)
    above = (p[None] > p[:, None]).sum(1)
    kept = map & (above < capacity)
    return probs.masked_fill(~kept, 0), kept
