# told: a rank without any
import torch
import torch.distributed as dist


def rank_loss(losses, mask, group=None):
    count = mask.sum().clamp(min=1.0)
    dist.all_reduce(count, group=group)
    return (losses * mask).sum() / count
