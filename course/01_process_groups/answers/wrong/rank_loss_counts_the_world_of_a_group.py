# told: number of counted tokens
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum() / dist.get_world_size(group)
    dist.all_reduce(count, group=group)
    return (losses * mask).sum() / (count * dist.get_world_size()).clamp(min=1.0)
