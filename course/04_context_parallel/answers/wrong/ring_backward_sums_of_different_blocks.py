# told: gradients of different blocks
import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift
def ring_backward(dout, q, k, v, out, lse, at, cp):
    block = torch.stack((k, v)); dq = torch.zeros_like(q); g = torch.zeros_like(block)
    for i in range(cp.size):
        sh = Shift(block, cp) if i < cp.size - 1 else None
        a, b, c = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[(cp.rank - i) % cp.size])
        dq += a; g += torch.stack((b, c))
        if sh: block = sh.wait()
    return dq, g[0], g[1]
