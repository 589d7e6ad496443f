# blocks from the last to the first, in float64; a list for an answer
import torch


def attend(q, k, v, q_at, k_at, block):
    top = torch.full((*q.shape[:2], 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(top), torch.zeros(q.shape, dtype=torch.float64)
    n = -(-k.shape[1] // block)
    for i in reversed(range(n)):
        cut = slice(i * block, (i + 1) * block)
        if not bool((k_at[cut][None, :] <= q_at[:, None]).any()):
            continue
        s = torch.bmm(q.double(), k[:, cut].double().transpose(1, 2)).div(q.shape[-1] ** 0.5)
        s[:, k_at[cut][None, :] > q_at[:, None]] = -torch.inf
        new = torch.maximum(top, s.max(-1, keepdim=True).values)
        safe = torch.where(new.isinf(), torch.zeros_like(new), new)
        out = out * (top - safe).exp() + (s - safe).exp() @ v[:, cut].double()
        total = total * (top - safe).exp() + (s - safe).exp().sum(-1, keepdim=True)
        top = new
    out = torch.where(total > 0, out / total, torch.zeros_like(out))
    return [out.to(q.dtype), (top + total.log())[..., 0].to(q.dtype)]
