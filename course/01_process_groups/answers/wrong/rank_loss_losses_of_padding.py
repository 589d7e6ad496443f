# told: where the mask is 0
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum()
    dist.all_reduce(count, group=group)
    return losses.sum() / count.clamp(min=1)
