# a functional collective; where() in place of the product
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
def rank_loss(losses, mask, group=None):
    n = fc.all_reduce(mask.count_nonzero().float(), "sum", group or dist.group.WORLD)
    return torch.where(mask > 0, losses, 0.0).sum() / torch.clamp_min(n, 1)
