# argsort and normalize; the sign from two comparisons
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def choose(scores, bias, k):
    i = (scores + bias).argsort(-1, descending=True)[:, :k]
    w = scores.gather(1, i)
    z = torch.zeros_like(scores)
    return z.scatter(1, i, F.normalize(w, p=1, dim=-1)), z.scatter(1, i, 1.0) > 0
def move_bias(bias, counts, rate):
    even = counts.sum() / len(counts)
    return bias + rate * ((counts < even).float() - (counts > even).float())
