# piece_backward and allclose, whose tolerance is measured by dq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.piece_backward import piece_backward
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C = len(ks)
    return [next(j for j in range(C) if torch.allclose(piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - i) % C])[0], dqs[i], rtol=1e-3, atol=1e-4 * dqs[i].abs().max().item())) for i in range(C)]
