# own isends, K and V in two messages, own attention over the quarters of which something is seen
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

from exercises.merge import merge
def ring_forward(q, k, v, at, cp):
    h, r, k, v = q.shape[1] // 2, cp.rank, k.contiguous(), v.contiguous()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    to, source = cp.ranks[(r + 1) % cp.size], cp.ranks[r - 1]
    for step in range(cp.size):
        j, works = (r - step) % cp.size, []
        if step < cp.size - 1:
            new = torch.empty_like(k), torch.empty_like(v)
            works = [dist.irecv(t, source, group=cp.group) for t in new]
            works += [dist.isend(t, to, group=cp.group) for t in (k, v)]
        for rows in (slice(h), slice(h, 2 * h)):
            for cols in (slice(h), slice(h, 2 * h)):
                if at[j][cols].min() <= at[r][rows].max():
                    more = piece(q[:, rows], k[:, cols], v[:, cols], at[r][rows], at[j][cols])
                    out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *more)
        for work in works:
            work.wait()
        if works:
            k, v = new
    return out, lse
