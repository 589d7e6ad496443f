# functional collectives, one-hot order
import torch
import torch.distributed._functional_collectives as funcol


def dispatch(rows, counts, ep):
    n = len(counts) // ep.size
    blocks = funcol.all_to_all_single(counts, [n] * ep.size, [n] * ep.size, ep.group).view(ep.size, n) + 0
    ins, outs = counts.view(ep.size, n).sum(1).tolist(), blocks.sum(1).tolist()
    got = funcol.all_to_all_single(rows.contiguous(), outs, ins, ep.group)
    expert = torch.arange(n).expand(ep.size, n).flatten().repeat_interleave(blocks.flatten())
    return got[expert.argsort(stable=True)], blocks


def combine(y, blocks, counts, ep):
    n = blocks.shape[1]
    expert = torch.arange(n).expand(ep.size, n).flatten().repeat_interleave(blocks.flatten())
    back = y[expert.argsort(stable=True).argsort()]
    ins, outs = blocks.sum(1).tolist(), counts.view(ep.size, n).sum(1).tolist()
    return funcol.all_to_all_single(back, outs, ins, ep.group) + 0
