# told: every rank calls dist.new_group
import torch
import torch.distributed as dist
def sync_tied(grad):
    if grad is None:
        return None
    group = dist.new_group([0, dist.get_world_size() - 1])
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total
