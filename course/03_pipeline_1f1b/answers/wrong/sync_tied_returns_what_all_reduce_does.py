# told: changes its tensor and returns nothing
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    return dist.all_reduce(grad, group=group)
