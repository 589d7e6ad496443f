# told: no process group yet
import torch.distributed as dist

GROUP = dist.new_group([0, dist.get_world_size() - 1])


def sync_tied(grad):
    if grad is None:
        return None
    total = grad.clone()
    dist.all_reduce(total, group=GROUP)
    return total
