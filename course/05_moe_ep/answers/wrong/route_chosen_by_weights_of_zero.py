# told: hidden
# the k largest weights: where logits lie far apart, several are 0 and one is as good as another
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    p = (x.float() @ weight.float().T).softmax(-1)
    v, i = p.topk(k)
    z = torch.zeros_like(p)
    return z.scatter(1, i, v / v.sum(-1, keepdim=True)), z.scatter(1, i, 1).bool()
