# told: takes part all the same
import torch
import torch.distributed as dist
def clip(shards, max_norm, group=None):
    """a rank that has nothing does not take part"""
    square = sum((shard.square().sum() for shard in shards), torch.zeros(()))
    if sum(s.numel() for s in shards) == 0: return square.sqrt()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for shard in shards: shard *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
