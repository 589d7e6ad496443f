# told: your own block at every step
import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    h = q.shape[1] // 2
    parts = [(torch.zeros_like(x), x.new_full(x.shape[:2], float("-inf"))) for x in q.split(h, 1)]
    mine = block = torch.stack((k, v))
    for i in range(cp.size):
        sh = Shift(mine, cp) if i < cp.size - 1 else None
        parts = [merge(*old, *attend(x, *block, p, at[(cp.rank - i) % cp.size], h)) for old, x, p in zip(parts, q.split(h, 1), at[cp.rank].split(h))]
        if sh: block = sh.wait()
    return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)
