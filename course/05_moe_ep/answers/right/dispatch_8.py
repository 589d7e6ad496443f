# counts by an all-gather into one tensor; the order of the rows by a sort of their experts, undone by its inverse
import torch
import torch.distributed as dist


def by_expert(blocks):
    return torch.arange(blocks.shape[1]).repeat(len(blocks)).repeat_interleave(blocks.flatten()).argsort(stable=True)


def dispatch(rows, counts, ep):
    table = counts.new_empty(ep.size * len(counts))
    dist.all_gather_into_tensor(table, counts, group=ep.group)
    blocks = table.view(ep.size, ep.size, -1)[:, ep.rank].contiguous()
    out = rows.new_empty(int(blocks.sum()), *rows.shape[1:])
    dist.all_to_all_single(
        out, rows.contiguous(), blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), group=ep.group
    )
    return out[by_expert(blocks)], blocks


def combine(y, blocks, counts, ep):
    y = y[by_expert(blocks).argsort()]
    out = y.new_empty(int(counts.sum()), *y.shape[1:])
    dist.all_to_all_single(out, y, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), group=ep.group)
    return out
