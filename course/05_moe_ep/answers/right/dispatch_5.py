# counts as Python objects, an autograd-aware all-to-all
import torch
import torch.distributed as dist
import torch.distributed.nn as dnn


def move(x, outs, ins, ep):
    out = x.new_empty((sum(outs), x.shape[1]))
    return dnn.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)


def dispatch(rows, counts, ep):
    told = [None] * ep.size
    dist.all_gather_object(told, counts.tolist(), group=ep.group)
    n = len(counts) // ep.size
    mine = [one[ep.rank * n : (ep.rank + 1) * n] for one in told]
    ins = [int(sum(counts.tolist()[r * n : (r + 1) * n])) for r in range(ep.size)]
    got = move(rows, [sum(b) for b in mine], ins, ep)
    keys = [(e, i) for i in range(ep.size) for e in range(n) for _ in range(mine[i][e])]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return got[torch.tensor(order, dtype=torch.long)], torch.tensor(mine)


def combine(y, blocks, counts, ep):
    mine, n = blocks.tolist(), blocks.shape[1]
    keys = [(e, i) for i in range(ep.size) for e in range(n) for _ in range(mine[i][e])]
    order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.long)
    back = torch.zeros_like(y).index_copy(0, order, y)
    return move(back, counts.view(ep.size, n).sum(1).tolist(), [sum(b) for b in mine], ep)
