# all pieces kept, and joined at the end by one softmax of their lse
import torch
from exercises.attend import attend

from minimegatron.comm.ring import Shift


def ring_forward(q, k, v, at, cp):
    half, mine, block, found = q.shape[1] // 2, at[cp.rank], torch.stack((k, v)), []
    for step in range(cp.size):
        shift = Shift(block, cp) if step + 1 < cp.size else None
        owner = at[(cp.rank - step) % cp.size]
        early, late = (
            attend(rows, block[0], block[1], places, owner, half)
            for rows, places in zip(q.split(half, 1), mine.split(half))
        )
        found.append((torch.cat((early[0], late[0]), 1), torch.cat((early[1], late[1]), 1)))
        block = shift.wait() if shift else block
    outs, lses = (torch.stack(parts) for parts in zip(*found))
    return (lses.softmax(0)[..., None] * outs).sum(0), lses.logsumexp(0)
