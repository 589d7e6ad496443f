# told: sequences' means
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    per = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
    n = torch.tensor(float(len(per)))
    dist.all_reduce(n, group=group)
    return per.sum() / n
