# head by head, query by query
import torch
import torch.distributed as dist
import torch.nn.functional as F
def attend(q, k, v, q_at, k_at, block):
    outs, lses = [], []
    for a in range(q.shape[0]):
        top = torch.full((q.shape[1],), -1e30); l = torch.zeros(q.shape[1]); o = torch.zeros(q.shape[1:])
        for i in range(0, k.shape[1], block):
            c = slice(i, i + block)
            if k_at[c].min() > q_at.max():
                continue
            s = (q[a] @ k[a, c].T / q.shape[-1] ** 0.5).masked_fill(q_at[:, None] < k_at[c], -torch.inf)
            m = torch.maximum(top, s.max(1).values)
            p = (s - m[:, None]).exp(); r = (top - m).exp()
            l = l * r + p.sum(1); o = o * r[:, None] + p @ v[a, c]; top = m
        outs.append(o / torch.where(l > 0, l, 1.0)[:, None]); lses.append(top + l.log())
    return torch.stack(outs), torch.stack(lses)
