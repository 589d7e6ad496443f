# one step after the other, as they are asked for
import torch
from exercises.piece_backward import piece_backward


def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    size = len(ks)
    for step, dq in enumerate(dqs):
        for j in range(size):
            mine = piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - step) % size])
            if torch.allclose(mine[0], dq, rtol=1e-3, atol=1e-4 * float(dq.norm())):
                yield j
                break
