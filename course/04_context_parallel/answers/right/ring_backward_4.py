import torch
from exercises.piece_backward import piece_backward
from minimegatron.comm.ring import Shift
def ring_backward(dout, q, k, v, out, lse, at, cp):
    block = torch.stack((k, v))
    moving = Shift(block, cp)
    dq, dk, dv = piece_backward(dout, q, k, v, out, lse, at[cp.rank], at[cp.rank])
    grad = None
    for i in range(1, cp.size):
        block = moving.wait()
        if i < cp.size - 1:
            moving = Shift(block, cp)
        a, b, c = piece_backward(dout, q, *block, out, lse, at[cp.rank], at[(cp.rank - i) % cp.size])
        dq = dq + a
        g = torch.stack((b, c))
        if grad is not None:
            g += grad.wait()
        grad = Shift(g, cp, tag=1)
    b, c = grad.wait()
    return dq, dk + b, dv + c
