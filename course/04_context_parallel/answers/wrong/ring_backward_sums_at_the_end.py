# told: 
import torch
import torch.distributed as dist
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift


def ring_backward(dout, q, k, v, out, lse, at, cp):
    dq, block = torch.zeros_like(q), torch.stack((k, v))
    parts = block.new_zeros(cp.size, *block.shape)
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, dk, dv = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more
        parts[owner] = torch.stack((dk, dv))
        if shift:
            block = shift.wait()
    dist.all_reduce(parts, group=cp.group)
    return dq, *parts[cp.rank]
