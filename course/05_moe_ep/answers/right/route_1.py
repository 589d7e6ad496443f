# a softmax of masked logits
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    logits = F.linear(x.float(), weight.float())
    map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)
    return logits.masked_fill(~map, -torch.inf).softmax(-1), map
