# told: changes
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum()
    dist.all_reduce(count, group=group)
    mask /= count.clamp(min=1.0)
    return (losses * mask).sum()
