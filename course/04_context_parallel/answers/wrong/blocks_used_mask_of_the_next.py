# told: another mask
import torch
from exercises.piece_backward import piece_backward


def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    used = []
    for step, got in enumerate(dqs):
        k_at = at[(rank + step) % len(ks)]
        apart = [(piece_backward(dout, q, k, v, out, lse, at[rank], k_at)[0] - got).norm() for k, v in zip(ks, vs)]
        used.append(int(torch.stack(apart).argmin()))
    return used
