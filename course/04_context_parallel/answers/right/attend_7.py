import torch


def attend(q, k, v, q_at, k_at, block):
    a, n, d = q.shape
    m = q.new_full((a, n), -torch.inf)
    l = q.new_zeros((a, n))
    o = q.new_zeros((a, n, v.shape[2]))
    for i in range(0, len(k_at), block):
        at = k_at[i : i + block]
        rows = torch.nonzero(q_at >= at.min()).squeeze(1)
        if len(rows) == 0:
            continue
        s = q[:, rows] @ k[:, i : i + block].mT / d**0.5
        s = s.masked_fill(at[None, None] > q_at[rows][None, :, None], -torch.inf)
        old = m[:, rows]
        new = torch.maximum(old, s.amax(2))
        p = torch.exp(s - new[:, :, None])
        c = torch.exp(old - new)
        l[:, rows] = l[:, rows] * c + p.sum(2)
        o[:, rows] = o[:, rows] * c[:, :, None] + p @ v[:, i : i + block]
        m[:, rows] = new
    return torch.where(l[..., None] > 0, o / l[..., None], o), m + l.log()
