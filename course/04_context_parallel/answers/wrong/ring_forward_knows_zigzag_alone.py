# told: right for zigzag alone
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    n = q.shape[1]; h = n // 2
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    block = torch.stack((k, v))
    for i in range(cp.size):
        sh = Shift(block, cp) if i < cp.size - 1 else None
        owner = (cp.rank - i) % cp.size
        kk, vv = block
        me, th = at[cp.rank], at[owner]
        todo = [(slice(0, h), slice(0, h)), (slice(h, n), slice(0, n))] if i == 0 else \
            [(slice(0, n), slice(0, h))] if owner < cp.rank else [(slice(h, n), slice(0, n))]
        for a, b in todo:
            o, l = attend(q[:, a], kk[:, b], vv[:, b], me[a], th[b], h)
            out[:, a], lse[:, a] = merge(out[:, a], lse[:, a], o, l)
        if sh: block = sh.wait()
    return out, lse
