# a group of the two ends, and an all-reduce in place
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    groups = [dist.new_group([0, n - 1])]
    if dist.get_rank() in (0, n - 1):
        dist.all_reduce(grad, group=groups[0])
    return grad
