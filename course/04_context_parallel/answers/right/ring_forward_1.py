# own isends, K and V in two messages, the three cases of zigzag by hand
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
    to, source = cp.ranks[(r + 1) % cp.size], cp.ranks[r - 1]
    for step in range(cp.size):
        j, works = (r - step) % cp.size, []
        if step < cp.size - 1:
            new = torch.empty_like(k), torch.empty_like(v)
            works = [dist.irecv(t, source, group=cp.group) for t in new]
            works += [dist.isend(t, to, group=cp.group) for t in (k, v)]
        if j == r:
            out, lse = piece(q, k, v, at[r], at[r])
        elif j < r:
            out, lse = merge(out, lse, *piece(q, k[:, :h], v[:, :h], at[r], at[j][:h]))
        else:
            late = merge(out[:, h:], lse[:, h:], *piece(q[:, h:], k, v, at[r][h:], at[j]))
            out, lse = torch.cat((out[:, :h], late[0]), 1), torch.cat((lse[:, :h], late[1]), 1)
        for work in works:
            work.wait()
        if works:
            k, v = new
    return out, lse
