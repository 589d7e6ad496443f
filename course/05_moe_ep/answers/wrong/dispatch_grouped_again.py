# told: needs its inverse
import torch
import torch.distributed as dist

def dispatch(rows, counts, ep):
    per = counts.numel() // ep.size
    blocks = torch.empty_like(counts).view(ep.size, per)
    dist.all_to_all_single(blocks, counts.view(ep.size, per), group=ep.group)
    out = rows.new_empty(int(blocks.sum()), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), blocks.sum(1).tolist(), counts.view(-1, per).sum(1).tolist(), group=ep.group)
    order = torch.arange(per).repeat(ep.size).repeat_interleave(blocks.flatten()).argsort(stable=True)
    return out[order], blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    order = torch.arange(per).repeat(ep.size).repeat_interleave(blocks.flatten()).argsort(stable=True)
    y = y[order]
    out = y.new_empty(int(counts.sum()), y.shape[1])
    dist.all_to_all_single(out, y, counts.view(-1, per).sum(1).tolist(), blocks.sum(1).tolist(), group=ep.group)
    return out
