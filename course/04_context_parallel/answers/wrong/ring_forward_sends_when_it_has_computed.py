# told: Nothing is computed between sending
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    h = q.shape[1] // 2
    parts = [(torch.zeros_like(x), x.new_full(x.shape[:2], float("-inf"))) for x in q.split(h, 1)]
    block = torch.stack((k, v))
    for i in range(cp.size):
        if i > 0:
            s = Shift(block, cp)
            block = s.wait()
        parts = [merge(*old, *attend(x, *block, p, at[(cp.rank - i) % cp.size], h)) for old, x, p in zip(parts, q.split(h, 1), at[cp.rank].split(h))]
    return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)
