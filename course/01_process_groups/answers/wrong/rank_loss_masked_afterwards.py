# told: number of counted tokens
import torch
import torch.distributed as dist


def rank_loss(losses, mask, group=None):
    count = mask.sum()
    dist.all_reduce(count, group=group)
    return losses.mean() * mask.sum() / count.clamp(min=1.0)
