# own messages, gradients of k and v apart, hidden halves left out
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.piece_backward import piece_backward
def ring_backward(dout, q, k, v, out, lse, at, cp):
    r, h = cp.rank, q.shape[1] // 2
    k, v, dq = k.contiguous(), v.contiguous(), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    def on(*ts):
        new = [torch.empty_like(t) for t in ts]
        works = [dist.isend(t, cp.ranks[(r + 1) % cp.size], group=cp.group) for t in ts]
        works += [dist.irecv(t, cp.ranks[r - 1], group=cp.group) for t in new]
        [w.wait() for w in works]
        return new
    for step in range(cp.size):
        j = (r - step) % cp.size
        rows = slice(h, None) if j > r else slice(None)
        cols = slice(0, h) if j < r else slice(None)
        g = piece_backward(dout[:, rows], q[:, rows], k[:, cols], v[:, cols], out[:, rows], lse[:, rows], at[r][rows], at[j][cols])
        dq[:, rows] += g[0]
        dk[:, cols] += g[1]
        dv[:, cols] += g[2]
        if step < cp.size - 1:
            k, v, dk, dv = on(k, v, dk, dv)
        else:
            dk, dv = on(dk, dv)
    return dq, dk, dv
