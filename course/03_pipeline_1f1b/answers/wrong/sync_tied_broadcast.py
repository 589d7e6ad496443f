# told: the one on the last rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    total = grad.contiguous().clone()
    dist.broadcast(total, 0, group=group)
    return total
