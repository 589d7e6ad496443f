# told: Every rank of the group takes part
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count = mask.sum()
    if count == 0:
        return (losses * mask).sum()
    dist.all_reduce(count, group=group)
    return (losses * mask).sum() / count
