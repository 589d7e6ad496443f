# told: split | rank
# the way back takes the splits of the way there
import torch
import torch.distributed as dist


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank].contiguous()
    out = rows.new_empty(int(blocks.sum()), *rows.shape[1:])
    there = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    dist.all_to_all_single(out, rows.contiguous(), *there, group=ep.group)
    pieces, local = out.split(blocks.flatten().tolist()), blocks.shape[1]
    return torch.cat([pieces[i * local + e] for e in range(local) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    pieces, local = y.split(blocks.T.flatten().tolist()), blocks.shape[1]
    y = torch.cat([pieces[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    out = y.new_empty(int(counts.sum()), *y.shape[1:])
    there = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    dist.all_to_all_single(out, y, *there, group=ep.group)
    return out
