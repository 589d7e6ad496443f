# powers of two: scores in units of log 2
import math

import torch


def attend(q, k, v, q_at, k_at, block):
    scale = math.log2(math.e) / math.sqrt(q.shape[-1])
    top = torch.full_like(q[..., :1], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for i in range(0, k.shape[1], block):
        at = k_at[i : i + block]
        if at.min() > q_at.max():
            continue
        scores = (q @ k[:, i : i + block].mT * scale).where(at <= q_at[:, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        finite = torch.where(torch.isinf(higher), 0.0, higher)
        p, shrink = torch.exp2(scores - finite), torch.exp2(top - finite)
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v[:, i : i + block], higher
    return out / total.clamp_min(torch.finfo(q.dtype).tiny), ((top + total.log2()) * math.log(2)).squeeze(-1)
