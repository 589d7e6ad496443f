# told: The splits do not fit the rows
# the output splits stand in the place of the input splits
import torch
import torch.distributed as dist


def dispatch(rows, counts, ep):
    local = len(counts) // ep.size
    blocks = torch.empty_like(counts)
    dist.all_to_all_single(blocks, counts, group=ep.group)
    blocks = blocks.view(ep.size, local)
    outs, ins = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    got = rows.new_empty(sum(outs), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), ins, outs, group=ep.group)
    return got, blocks


def combine(y, blocks, counts, ep):
    return y
