# told: it calls all_gather
import torch
import torch.distributed as dist
import torch.nn.functional as F

from exercises.piece_backward import piece_backward
def ring_backward(dout, q, k, v, out, lse, at, cp):
    both = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(cp.size)]
        dist.all_gather(parts, x, group=cp.group)
        both.append(torch.cat(parts, 1))
    dq, dk, dv = piece_backward(dout, q, *both, out, lse, at[cp.rank], torch.cat(at))
    for x in (dk, dv):
        dist.all_reduce(x, group=cp.group)
    n = q.shape[1]
    mine = slice(cp.rank * n, cp.rank * n + n)
    return dq, dk[:, mine].contiguous(), dv[:, mine].contiguous()
