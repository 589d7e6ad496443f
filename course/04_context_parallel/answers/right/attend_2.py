# two passes: first the maximum, then the sums, scores computed twice
import torch
def attend(q, k, v, q_at, k_at, block):
    parts = [slice(i, i + block) for i in range(0, k.shape[1], block)]
    parts = [c for c in parts if k_at[c].min() <= q_at.max()]
    S = lambda c: torch.where(k_at[c] <= q_at[:, None], q @ k[:, c].mT, torch.tensor(-torch.inf)) / q.shape[-1] ** 0.5
    m = q.new_full(q.shape[:2], -torch.inf)
    for c in parts:
        m = torch.maximum(m, S(c).amax(-1))
    f = m.nan_to_num(neginf=0.0)[..., None]
    l, o = torch.zeros_like(m), torch.zeros_like(q)
    for c in parts:
        p = (S(c) - f).exp()
        l, o = l + p.sum(-1), o + p @ v[:, c]
    return o / l.clamp_min(1e-30)[..., None], m + l.log()
