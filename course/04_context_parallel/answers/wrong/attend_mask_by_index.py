# told: the places q_at and k_at
import torch


def attend(q, k, v, q_at, k_at, block):
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for i in range(0, k.shape[1], block):
        rows, cols = torch.arange(q.shape[1]), torch.arange(i, min(i + block, k.shape[1]))
        hidden = cols > rows[:, None]
        if hidden.all():
            continue
        s = (q @ k[:, cols].mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        total = torch.logaddexp(lse, torch.logsumexp(s, -1))
        ref = torch.where(total == -torch.inf, torch.zeros_like(total), total)
        out = out * (lse - ref).exp().unsqueeze(-1) + (s - ref.unsqueeze(-1)).exp() @ v[:, cols]
        lse = total
    return out, lse
