# counts by an all-to-all of their own, rows in one index
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce

def order(blocks):
    n, starts = blocks.flatten(), blocks.flatten().cumsum(0) - blocks.flatten()
    P, local = blocks.shape
    places = [torch.arange(n[i * local + e]) + starts[i * local + e] for e in range(local) for i in range(P)]
    return torch.cat(places)
def exchange(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out
def dispatch(rows, counts, ep):
    blocks = torch.empty_like(counts)
    dist.all_to_all_single(blocks, counts, group=ep.group)
    blocks = blocks.view(ep.size, -1)
    got = exchange(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    return got[order(blocks)], blocks
def combine(y, blocks, counts, ep):
    back = torch.empty_like(y)
    back[order(blocks)] = y
    return exchange(back, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)
