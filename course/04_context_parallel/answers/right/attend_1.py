# merged pieces: a block is a small attention
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
def attend(q, k, v, q_at, k_at, block):
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    for i in range(0, k.shape[1], block):
        c = slice(i, i + block)
        if (k_at[c] > q_at.max()).all():
            continue
        more, l = piece(q, k[:, c], v[:, c], q_at, k_at[c])
        t = torch.logaddexp(lse, l)
        f = t.nan_to_num(neginf=0.0)
        out, lse = out * (lse - f).exp()[..., None] + more * (l - f).exp()[..., None], t
    return out, lse
