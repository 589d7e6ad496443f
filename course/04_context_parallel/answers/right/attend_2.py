# two passes: first the maximum, then the sums
import torch
import torch.distributed as dist
import torch.nn.functional as F
def attend(q, k, v, q_at, k_at, block):
    parts = [slice(i, i + block) for i in range(0, k.shape[1], block)]
    parts = [c for c in parts if k_at[c].min() <= q_at.max()]
    S = lambda c: torch.where(k_at[c] <= q_at[:, None], q @ k[:, c].mT, torch.tensor(-torch.inf)) / q.shape[-1] ** 0.5
    kept = [S(c) for c in parts]
    if not kept:
        return q * 0, q.new_full(q.shape[:2], -torch.inf)
    m = torch.stack([s.amax(-1) for s in kept]).amax(0)
    f = m.nan_to_num(neginf=0.0)[..., None]
    l = sum((s - f).exp().sum(-1) for s in kept)
    o = sum((s - f).exp() @ v[:, c] for s, c in zip(kept, parts))
    return o / l.clamp_min(1e-30)[..., None], m + l.log()
