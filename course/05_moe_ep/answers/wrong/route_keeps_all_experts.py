# told: Keep the k largest
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def route(x, weight, k):
    p = (x.float() @ weight.float().T).softmax(-1)
    return p, p >= 0
