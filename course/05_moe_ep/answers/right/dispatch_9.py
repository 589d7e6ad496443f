import torch
import torch.distributed as dist

def _exchange(x, sent, came, ep):
    parts = x.contiguous().split(sent)
    got = [x.new_empty(n, *x.shape[1:]) for n in came]
    got[ep.rank].copy_(parts[ep.rank])
    ops = []
    for other in range(ep.size):
        if other != ep.rank:
            there = dist.get_global_rank(ep.group, other)
            if sent[other]:
                ops.append(dist.P2POp(dist.isend, parts[other].contiguous(), there, group=ep.group))
            if came[other]:
                ops.append(dist.P2POp(dist.irecv, got[other], there, group=ep.group))
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return torch.cat(got)

def dispatch(rows, counts, ep):
    per = len(counts) // ep.size
    blocks = _exchange(counts, [per] * ep.size, [per] * ep.size, ep).view(ep.size, per)
    got = _exchange(rows, counts.view(-1, per).sum(1).tolist(), blocks.sum(1).tolist(), ep)
    pieces = got.split(blocks.flatten().tolist())
    return torch.cat([p for e in range(per) for p in pieces[e::per]]), blocks

def combine(y, blocks, counts, ep):
    per = blocks.shape[1]
    pieces = y.split(blocks.T.flatten().tolist())
    y = torch.cat([p for i in range(ep.size) for p in pieces[i :: ep.size]])
    return _exchange(y, blocks.sum(1).tolist(), counts.view(-1, per).sum(1).tolist(), ep)
