import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    own = mask.sum()
    total = own.clone()
    dist.all_reduce(total, group=group)
    mean = (losses * mask).sum() / torch.clamp(own, min=1)
    return mean * own / torch.clamp(total, min=1)
