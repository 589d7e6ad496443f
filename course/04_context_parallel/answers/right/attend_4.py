# hidden queries picked out: work on those that see something
import torch


def attend(q, k, v, q_at, k_at, block):
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype)
    for first in range(0, k.shape[1], block):
        cols = torch.arange(first, min(first + block, k.shape[1]))
        rows = torch.nonzero(q_at >= k_at[cols].min()).flatten()
        if rows.numel() == 0:
            continue
        s = torch.einsum("and,amd->anm", q[:, rows], k[:, cols]) * q.shape[-1] ** -0.5
        s = s.masked_fill(q_at[rows][:, None] < k_at[cols][None], float("-inf"))
        new = torch.logaddexp(lse[:, rows], s.logsumexp(-1))
        old = torch.exp(lse[:, rows] - new)[..., None]
        out[:, rows] = out[:, rows] * old + torch.exp(s - new[..., None]) @ v[:, cols]
        lse[:, rows] = new
    return out, lse
