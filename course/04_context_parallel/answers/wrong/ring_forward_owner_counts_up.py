# told: places of another rank
import torch
import torch.distributed as dist
from exercises.attend import attend
from exercises.merge import merge


def ring_forward(q, k, v, at, cp):
    half, mine = q.shape[1] // 2, at[cp.rank]
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[cp.rank - 1]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    block = torch.stack((k, v))
    for step in range(cp.size):
        works, new = [], torch.empty_like(block)
        if step < cp.size - 1:
            works = [dist.isend(block, to, group=cp.group), dist.irecv(new, source, group=cp.group)]
        owner = (cp.rank + step) % cp.size
        for rows in (slice(0, half), slice(half, None)):
            piece = attend(q[:, rows], block[0], block[1], mine[rows], at[owner], half)
            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)
        for work in works:
            work.wait()
        block = new
    return out, lse
