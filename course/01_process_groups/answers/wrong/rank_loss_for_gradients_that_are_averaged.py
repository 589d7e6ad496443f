# told: number of ranks
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum()
    dist.all_reduce(count, group=group)
    return (losses * mask).sum() * dist.get_world_size(group) / count.clamp(min=1)
