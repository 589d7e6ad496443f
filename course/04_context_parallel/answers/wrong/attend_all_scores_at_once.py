# told: half of one head's scores
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
def attend(q, k, v, q_at, k_at, block):
    return piece(q, k, v, q_at, k_at)
