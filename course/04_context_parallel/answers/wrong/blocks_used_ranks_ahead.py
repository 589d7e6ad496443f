# told: ahead. Return the rank
import torch
from exercises.piece_backward import piece_backward
def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):
    C = len(ks); used = []
    for i, dq in enumerate(dqs):
        err = [(piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - i) % C])[0] - dq).norm().item() for j in range(C)]
        used.append((min(range(C), key=err.__getitem__) - rank + i) % C)
    return used
