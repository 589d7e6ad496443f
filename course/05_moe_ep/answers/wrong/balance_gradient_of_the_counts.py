# told: without a gradient
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def balance(logits, k, coeff):
    T, E = logits.shape
    p = logits.softmax(-1)
    m = p.mean(0)
    c = 2 * coeff * E * m / T
    return coeff * E * (m * m).sum(), p * (c - (p * c).sum(-1, keepdim=True))
