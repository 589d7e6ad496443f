# told: exactly k
# in double, token by token: all that reach the k-th
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    probs, map = [], []
    for row in x:
        logits = weight.double() @ row.double()
        kth = logits.sort().values[-k]
        m = logits >= kth
        e = (logits - logits.max()).exp() * m
        probs.append((e / e.sum()).float())
        map.append(m)
    return torch.stack(probs), torch.stack(map)
