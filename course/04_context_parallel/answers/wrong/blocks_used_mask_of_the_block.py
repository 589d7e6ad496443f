# told: another mask
import torch
from exercises.piece_backward import piece_backward


def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    used = []
    for step, got in enumerate(dqs):
        k_at = at[(rank - step) % len(ks)]
        apart = [(piece_backward(dout, q, k, v, out, lse, at[rank], p)[0] - got).norm() for k, v, p in zip(ks, vs, at)]
        used.append(int(torch.stack(apart).argmin()))
    return used
