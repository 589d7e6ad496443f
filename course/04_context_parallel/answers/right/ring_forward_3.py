# sends first, receives in a blocking call after the work
import torch
import torch.distributed as dist
from exercises.attend import attend
from exercises.merge import merge


def ring_forward(q, k, v, at, cp):
    n = q.shape[1]
    halves = torch.arange(n).chunk(2)
    results = {}
    block = torch.stack((k, v)).contiguous()
    for step in range(cp.size):
        sent = None
        if step < cp.size - 1:
            sent = dist.isend(block, group=cp.group, group_dst=(cp.rank + 1) % cp.size)
        owner = (cp.rank - step) % cp.size
        for i, rows in enumerate(halves):
            piece = attend(q[:, rows], *block, at[cp.rank][rows], at[owner], n // 2)
            results[i] = merge(*results[i], *piece) if i in results else piece
        if sent is not None:
            new = torch.empty_like(block)
            dist.recv(new, group=cp.group, group_src=(cp.rank - 1) % cp.size)
            sent.wait()
            block = new
    outs, lses = zip(*results.values())
    return torch.cat(outs, 1), torch.cat(lses, 1)
