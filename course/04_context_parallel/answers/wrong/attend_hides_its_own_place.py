# told: at its own place
import torch


def attend(q, k, v, q_at, k_at, block):
    top = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values, at in zip(k.split(block, 1), v.split(block, 1), k_at.split(block)):
        if at.min() >= q_at.max():
            continue
        scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(at >= q_at[:, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        finite = higher.masked_fill(higher == -torch.inf, 0.0)
        p, shrink = torch.exp(scores - finite), torch.exp(top - finite)
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values, higher
    return out / total.masked_fill(total == 0, 1.0), (top + total.log()).squeeze(-1)
