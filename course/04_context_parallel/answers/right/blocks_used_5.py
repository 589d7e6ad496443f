# all distances at once
import torch
from exercises.piece_backward import piece_backward


def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C = len(ks)
    nearest = []
    for step, dq in enumerate(dqs):
        there = at[(rank - step) % C]
        tries = [piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], there)[0].flatten() for j in range(C)]
        nearest.append(torch.cdist(dq.reshape(1, -1), torch.stack(tries)).argmin())
    return torch.stack(nearest)
