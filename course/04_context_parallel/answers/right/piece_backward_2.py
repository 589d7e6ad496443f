# einsum throughout
import torch
import torch.distributed as dist
import torch.nn.functional as F
def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    d = q.shape[-1] ** 0.5
    s = torch.einsum('aid,ajd->aij', q, k) / d
    p = (s - lse.unsqueeze(2)).exp().masked_fill(q_at.unsqueeze(1) < k_at, 0)
    dp = torch.einsum('aid,ajd->aij', dout, v)
    ds = p * (dp - torch.einsum('aid,aid->ai', dout, out).unsqueeze(2)) / d
    return torch.einsum('aij,ajd->aid', ds, k), torch.einsum('aij,aid->ajd', ds, q), torch.einsum('aij,aid->ajd', p, dout)
