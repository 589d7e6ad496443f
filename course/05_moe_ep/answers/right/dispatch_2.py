# messages from rank to rank, one for each pair of ranks that has something to say
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce

def swap(parts, shapes, ep):
    got, works = [], []
    for r in range(ep.size):
        got.append(parts[r] if r == ep.rank else parts[r].new_empty(shapes[r], *parts[r].shape[1:]))
    for r in range(ep.size):
        if r != ep.rank and shapes[r]:
            works.append(dist.irecv(got[r], ep.ranks[r], group=ep.group))
        if r != ep.rank and len(parts[r]):
            works.append(dist.isend(parts[r].contiguous(), ep.ranks[r], group=ep.group))
    [work.wait() for work in works]
    return got
def dispatch(rows, counts, ep):
    blocks = torch.stack(swap(list(counts.view(ep.size, -1)), [len(counts) // ep.size] * ep.size, ep))
    got = swap(list(rows.split(counts.view(ep.size, -1).sum(1).tolist())), blocks.sum(1).tolist(), ep)
    pieces = [part.split(block.tolist()) for part, block in zip(got, blocks)]
    return torch.cat([p[e] for e in range(blocks.shape[1]) for p in pieces]), blocks
def combine(y, blocks, counts, ep):
    mine, pieces = list(y.split(blocks.T.flatten().tolist())), []
    for i in range(ep.size):
        pieces.append(torch.cat(mine[i :: ep.size]))
    return torch.cat(swap(pieces, counts.view(ep.size, -1).sum(1).tolist(), ep))
