import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import math
def clip(shards, max_norm, group=None):
    """torch.distributed.nn; hypot of per-tensor norms"""
    sq = torch.tensor([sum(float(s.double().pow(2).sum()) for s in shards)], dtype=torch.float64)
    total = dfn.all_reduce(sq, group=group or dist.group.WORLD)
    norm = math.sqrt(total.item())
    torch._foreach_mul_(shards, min(1.0, max_norm / (norm + 1e-12))) if shards else None
    return torch.tensor(norm)
