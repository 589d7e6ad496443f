# told: this rank's share
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    count, total = mask.sum(), (losses * mask).sum()
    dist.all_reduce(count, group=group)
    loss = total / count.clamp(min=1.0)
    dist.all_reduce(loss, group=group)
    return loss
