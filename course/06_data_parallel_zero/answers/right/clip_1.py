import torch
import torch.distributed as dist
def clip(shards, max_norm, group=None):
    """vector of squares all-reduced"""
    sq = torch.stack([s.square().sum() for s in shards]); dist.all_reduce(sq, group=group)
    norm = sq.sum().sqrt()
    if norm > max_norm:
        for s in shards: s.mul_(max_norm / norm)
    return norm
