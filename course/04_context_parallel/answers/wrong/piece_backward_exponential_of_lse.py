# told: overflows, and so does
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    c = q.shape[-1] ** -0.5
    s = (q @ k.mT * c).masked_fill(q_at[:, None] < k_at, -torch.inf)
    p = s.exp() / lse.exp()[..., None]
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * c
    return ds @ k, ds.mT @ q, p.mT @ dout
