# the counts as a vector with one entry a rank; a dot product
import torch
import torch.distributed as dist
def rank_loss(losses, mask, group=None):
    n = torch.zeros(dist.get_world_size(group))
    n[dist.get_rank(group)] = mask.sum()
    dist.all_reduce(n, group=group)
    return torch.dot(losses.flatten(), mask.flatten()) / max(n.sum().item(), 1)
