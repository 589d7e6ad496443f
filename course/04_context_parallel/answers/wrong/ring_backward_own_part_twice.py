# told: in the sum twice
import torch
from exercises.piece_backward import piece_backward

from minimegatron.comm.ring import Shift


def ring_backward(dout, q, k, v, out, lse, at, cp):
    dq, block, part = torch.zeros_like(q), torch.stack((k, v)), torch.zeros(2, *k.shape, dtype=k.dtype)
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, *both = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more
        if step == 0:
            own = torch.stack(both)
        part = Shift(part + torch.stack(both), cp, tag=1).wait()
        if shift:
            block = shift.wait()
    part = part + own
    return dq, part[0], part[1]
