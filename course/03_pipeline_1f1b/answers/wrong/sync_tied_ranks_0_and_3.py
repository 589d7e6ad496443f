# told: rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    group = dist.new_group([0, 3 if n > 3 else 1])
    if grad is None:
        return None
    total = grad.clone()
    if dist.get_rank() in (0, 3 if n > 3 else 1):
        dist.all_reduce(total, group=group)
    return total
