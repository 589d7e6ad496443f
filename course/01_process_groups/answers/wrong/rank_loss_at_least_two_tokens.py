# told: number of counted tokens
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum()
    dist.all_reduce(count, group=group)
    return (losses * mask).sum() / count.clamp(min=2.0)
