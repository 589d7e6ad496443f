# told: it becomes NaN
import torch


def attend(q, k, v, q_at, k_at, block):
    a, n, d = q.shape
    m = q.new_full((a, n), -torch.inf)
    l = q.new_zeros((a, n))
    o = torch.zeros_like(q)
    for i in range(0, len(k_at), block):
        see = q_at[:, None] >= k_at[i : i + block][None]
        if not see.any():
            continue
        s = (q @ k[:, i : i + block].mT / d**0.5).masked_fill(~see, -torch.inf)
        new = torch.maximum(m, s.amax(2))
        p = torch.exp(s - new[..., None])
        c = torch.exp(m - new)
        l = l * c + p.sum(2)
        o = o * c[..., None] + p @ v[:, i : i + block]
        m = new
    return o / l[..., None], m + l.log()
