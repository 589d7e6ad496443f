# told: this rank's share
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    both = torch.stack([(losses * mask).sum().detach(), mask.sum()])
    dist.all_reduce(both, group=group)
    count = both[1].clamp(min=1.0)
    mine = (losses * mask).sum() / count
    return mine + (both[0] / count - mine).detach()
