# told: subtract the running maximum
import torch
import torch.distributed as dist
import torch.nn.functional as F
def attend(q, k, v, q_at, k_at, block):
    p = torch.exp((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(q_at[:, None] < k_at, -torch.inf))
    l = p.sum(-1)
    return p @ v / l[..., None], l.log()
