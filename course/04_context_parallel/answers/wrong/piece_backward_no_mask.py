# told: P is 0 where
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    sigma = q.shape[-1] ** -0.5
    scores = (q @ k.mT * sigma)
    p = torch.exp(scores - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma
    return ds @ k, ds.mT @ q, p.mT @ dout
