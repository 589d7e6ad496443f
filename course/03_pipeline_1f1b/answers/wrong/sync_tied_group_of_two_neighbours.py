# told: not part of group | group | rank
import torch.distributed as dist


def sync_tied(grad):
    group = dist.new_group([0, 1])
    if grad is None:
        return None
    dist.all_reduce(grad, group=group)
    return grad
