# told: nothing is divided
import torch.distributed as dist


def sync_tied(grad):
    n = dist.get_world_size()
    group = dist.new_group([0, n - 1])
    if grad is None:
        return None
    dist.all_reduce(grad, group=group)
    return grad / n
