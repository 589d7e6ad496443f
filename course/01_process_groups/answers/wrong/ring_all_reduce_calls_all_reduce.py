# told: Phase 1
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    x = x.clone()
    dist.all_reduce(x)
    return x
