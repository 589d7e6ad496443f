# summed on the first rank, then sent to the other one
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    pair = dist.new_group([0, n - 1])
    if grad is None:
        return None
    total = grad.clone()
    dist.reduce(total, 0, group=pair)
    dist.broadcast(total, 0, group=pair)
    return total
