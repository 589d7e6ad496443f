# told: 
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    sigma = q.shape[-1] ** -0.5
    scores = (q @ k.mT * sigma).masked_fill(k_at > q_at[:, None], -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma
    return ds @ k, ds.mT @ q, p.mT @ dout
