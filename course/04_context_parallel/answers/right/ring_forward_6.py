import torch
from exercises.attend import attend
from exercises.merge import merge
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    n = q.shape[1]
    parts = [(torch.zeros_like(x), x.new_full(x.shape[:2], float("-inf"))) for x in q.chunk(2, 1)]
    block, owner = torch.cat((k[None], v[None])), cp.rank
    while True:
        more = (owner - 1) % cp.size != cp.rank
        moving = Shift(block, cp) if more else None
        kk, vv = block.unbind()
        parts = [merge(*old, *attend(x, kk, vv, p, at[owner], n // 2)) for old, x, p in zip(parts, q.chunk(2, 1), at[cp.rank].chunk(2))]
        if not more:
            break
        block = moving.wait()
        owner = (owner - 1) % cp.size
    outs, lses = zip(*parts)
    return torch.cat(outs, 1), torch.cat(lses, 1)
