# told: has no gradient
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    own = mask.sum()
    count = own.clone()
    dist.all_reduce(count, group=group)
    if own == 0:
        return torch.tensor(0.0)
    return (losses * mask).sum() / count
