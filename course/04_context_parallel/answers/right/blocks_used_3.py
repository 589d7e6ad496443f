# a tensor of all differences; a tuple
import torch
from exercises.piece_backward import piece_backward


def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    def of(step, j):
        return piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - step) % len(ks)])[0]

    apart = torch.tensor([[(of(i, j) - dq).abs().max() for j in range(len(ks))] for i, dq in enumerate(dqs)])
    return tuple(apart.argmin(1).tolist())
