# told: it calls all_gather
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse

def ring_forward(q, k, v, at, cp):
    both = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(cp.size)]
        dist.all_gather(parts, x, group=cp.group)
        both.append(torch.cat(parts, 1))
    return piece(q, *both, at[cp.rank], torch.cat(at))
