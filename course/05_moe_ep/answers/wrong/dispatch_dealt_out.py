# told: every P-th expert
import torch
import torch.distributed as dist

def dispatch(rows, counts, ep):
    per = counts.numel() // ep.size
    dealt = counts.view(per, ep.size).T.contiguous()
    pieces = rows.split(counts.tolist())
    rows = torch.cat([pieces[e * ep.size + r] for r in range(ep.size) for e in range(per)])
    blocks = torch.empty_like(dealt)
    dist.all_to_all_single(blocks, dealt, group=ep.group)
    out = rows.new_empty(int(blocks.sum()), rows.shape[1])
    dist.all_to_all_single(out, rows, blocks.sum(1).tolist(), dealt.sum(1).tolist(), group=ep.group)
    parts = out.split(blocks.flatten().tolist())
    return torch.cat([parts[i * per + e] for e in range(per) for i in range(ep.size)]), blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    dealt = counts.view(per, ep.size).T.contiguous()
    parts = y.split(blocks.T.flatten().tolist())
    y = torch.cat([parts[e * ep.size + i] for i in range(ep.size) for e in range(per)])
    out = y.new_empty(int(counts.sum()), y.shape[1])
    dist.all_to_all_single(out, y, dealt.sum(1).tolist(), blocks.sum(1).tolist(), group=ep.group)
    parts = out.split(dealt.flatten().tolist())
    return torch.cat([parts[r * per + e] for e in range(per) for r in range(ep.size)])
