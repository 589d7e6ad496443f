# told:
import torch
import torch.distributed as dist

def travel(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out


def dispatch(rows, counts, ep):
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack([c.view(-1, 2)[ep.rank] for c in everybody])
    got = travel(rows, blocks.sum(1).tolist(), counts.view(-1, 2).sum(1).tolist(), ep)
    parts = got.split(blocks.flatten().tolist())
    return torch.cat(parts[0::2] + parts[1::2]), blocks


def combine(y, blocks, counts, ep):
    parts = y.split(blocks.T.flatten().tolist())
    y = torch.cat([p for pair in zip(parts[: ep.size], parts[ep.size :]) for p in pair])
    return travel(y, counts.view(-1, 2).sum(1).tolist(), blocks.sum(1).tolist(), ep)
