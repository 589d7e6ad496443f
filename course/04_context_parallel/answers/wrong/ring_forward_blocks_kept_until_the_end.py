# told: Nothing is computed between sending and waiting
import torch
from exercises.attend import attend
from minimegatron.comm.ring import Shift


def ring_forward(q, k, v, at, cp):
    blocks, block = [], torch.stack((k, v))
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        blocks.append((block, at[(cp.rank - step) % cp.size]))
        if shift:
            block = shift.wait()
    k, v = torch.cat([b for b, _ in blocks], 2)
    return attend(q, k, v, at[cp.rank], torch.cat([places for _, places in blocks]), q.shape[1] // 2)
