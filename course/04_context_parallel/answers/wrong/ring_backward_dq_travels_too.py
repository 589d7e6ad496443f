# told: 
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward


def ring_backward(dout, q, k, v, out, lse, at, cp):
    to, source = cp.ranks[(cp.rank + 1) % cp.size], cp.ranks[cp.rank - 1]

    def shift(x, tag):
        new = torch.empty_like(x)
        works = [dist.isend(x, to, group=cp.group, tag=tag), dist.irecv(new, source, group=cp.group, tag=tag)]
        return new, works, x

    def wait(new, works, x):
        for work in works:
            work.wait()
        return new

    dq, block = torch.zeros_like(q), torch.stack((k, v))
    for step in range(cp.size):
        ahead = shift(block, 0) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, dk, dv = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more
        dq = dq.contiguous()
        wait(*shift(dq, 2))
        part = torch.stack((dk, dv))
        if step > 0:
            part += wait(*behind)
        behind = shift(part, 1)
        if ahead:
            block = wait(*ahead)
    dk, dv = wait(*behind)
    return dq, dk, dv
