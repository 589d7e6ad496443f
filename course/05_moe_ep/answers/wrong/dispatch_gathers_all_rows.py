# told: busiest rank's rows
# every rank gets all rows, and picks its own
import torch
import torch.distributed as dist


def gathered(x, ep):
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ep.size)]
    dist.all_gather(sizes, torch.tensor([len(x)]), group=ep.group)
    most = int(max(sizes))
    padded = torch.cat((x, x.new_zeros(most - len(x), *x.shape[1:])))
    parts = [torch.empty_like(padded) for _ in range(ep.size)]
    dist.all_gather(parts, padded, group=ep.group)
    return [part[:n] for part, n in zip(parts, sizes)]


def dispatch(rows, counts, ep):
    table, local = gathered(counts, ep), len(counts) // ep.size
    mine = slice(ep.rank * local, ep.rank * local + local)
    pieces = [r.split(t.tolist())[mine] for r, t in zip(gathered(rows, ep), table)]
    return torch.cat([p[e] for e in range(local) for p in pieces]), torch.stack([t[mine] for t in table])


def combine(y, blocks, counts, ep):
    tables, home = gathered(blocks, ep), []
    for part, table in zip(gathered(y, ep), tables):
        home += part.split(table.T.flatten().tolist())[ep.rank :: ep.size]
    return torch.cat(home)
