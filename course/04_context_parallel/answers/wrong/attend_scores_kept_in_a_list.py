# told: 
import torch


def attend(q, k, v, q_at, k_at, block):
    parts = [slice(i, i + block) for i in range(0, k.shape[1], block)]
    parts = [c for c in parts if k_at[c].min() <= q_at.max()]
    kept = [(q @ k[:, c].mT / q.shape[-1] ** 0.5).masked_fill(k_at[c] > q_at[:, None], -torch.inf) for c in parts]
    if not kept:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    top = torch.stack([s.amax(-1) for s in kept]).amax(0)
    finite = top.masked_fill(top == -torch.inf, 0.0)[..., None]
    total = sum((s - finite).exp().sum(-1) for s in kept)
    out = sum((s - finite).exp() @ v[:, c] for s, c in zip(kept, parts))
    return out / total.masked_fill(total == 0, 1.0)[..., None], top + total.log()
