# counts by an all-reduce of a table; a batch of messages
import torch
import torch.distributed as dist


def travel(parts, sizes, like, ep):
    got, ops = [like.new_empty(n, *like.shape[1:]) for n in sizes], []
    for r in range(ep.size):
        if r == ep.rank:
            got[r].copy_(parts[r])
            continue
        ops.append(dist.P2POp(dist.isend, parts[r].contiguous(), ep.ranks[r], group=ep.group))
        ops.append(dist.P2POp(dist.irecv, got[r], ep.ranks[r], group=ep.group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def dispatch(rows, counts, ep):
    table = torch.zeros(ep.size, len(counts), dtype=torch.int64)
    table[ep.rank] = counts
    dist.all_reduce(table, group=ep.group)
    blocks = table.unflatten(1, (ep.size, -1))[:, ep.rank].clone()
    got = travel(rows.split(counts.view(ep.size, -1).sum(1).tolist()), blocks.sum(1).tolist(), rows, ep)
    pieces = [g.split(b.tolist()) for g, b in zip(got, blocks)]
    return torch.cat([pieces[i][e] for e in range(blocks.shape[1]) for i in range(ep.size)]), blocks


def combine(y, blocks, counts, ep):
    table = list(y.split(blocks.T.flatten().tolist()))
    parts = [torch.cat(table[i :: ep.size]) for i in range(ep.size)]
    return torch.cat(travel(parts, counts.view(ep.size, -1).sum(1).tolist(), y, ep))
