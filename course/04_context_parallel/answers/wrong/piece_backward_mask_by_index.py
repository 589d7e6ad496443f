# told: The mask compares the places
import torch


def piece_backward(dout, q, k, v, out, lse, q_at, k_at):
    sigma = q.shape[-1] ** -0.5
    scores = (q @ k.mT * sigma).masked_fill(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1), -torch.inf)
    p = torch.exp(scores - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma
    return ds @ k, ds.mT @ q, p.mT @ dout
