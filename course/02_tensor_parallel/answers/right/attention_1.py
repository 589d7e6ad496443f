# the formula, with f by hand
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def attention(x, qkv, proj, d, queries_per_group, tp):
    n = queries_per_group
    s, b, h = x.shape
    packed = F.linear(copy_to_region(x, tp), *qkv).view(s, b, -1, n + 2, d)
    q, k, v = packed[..., :n, :], packed[..., n, :], packed[..., n + 1, :]
    scores = torch.einsum('sbgnd,tbgd->bgnst', q, k) * d**-0.5
    scores = scores + torch.full((s, s), float('-inf')).triu(1)
    out = torch.einsum('bgnst,tbgd->sbgnd', scores.softmax(-1), v).reshape(s, b, -1)
    return reduce_from_region(F.linear(out, proj[0]), tp) + proj[1]
