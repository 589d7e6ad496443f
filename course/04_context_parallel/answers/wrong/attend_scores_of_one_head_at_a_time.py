# told: 
import torch


def attend(q, k, v, q_at, k_at, block):
    outs, lses = [], []
    for head in range(q.shape[0]):
        parts = [slice(i, i + block) for i in range(0, k.shape[1], block)]
        parts = [c for c in parts if k_at[c].min() <= q_at.max()]
        kept = [q[head] @ k[head, c].mT / q.shape[-1] ** 0.5 for c in parts]
        kept = [s.masked_fill(k_at[c] > q_at[:, None], -torch.inf) for s, c in zip(kept, parts)]
        if not kept:
            outs.append(torch.zeros_like(q[head]))
            lses.append(q.new_full(q.shape[1:2], -torch.inf))
            continue
        top = torch.stack([s.amax(-1) for s in kept]).amax(0)
        finite = top.masked_fill(top == -torch.inf, 0.0)[..., None]
        total = sum((s - finite).exp().sum(-1) for s in kept)
        out = sum((s - finite).exp() @ v[head, c] for s, c in zip(kept, parts))
        outs.append(out / total.masked_fill(total == 0, 1.0)[..., None])
        lses.append(top + total.log())
    return torch.stack(outs), torch.stack(lses)
