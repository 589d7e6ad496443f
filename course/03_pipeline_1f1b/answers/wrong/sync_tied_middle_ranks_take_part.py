# told: holds no copy
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    shape = [None] * n
    dist.all_gather_object(shape, None if grad is None else grad.shape)
    total = torch.zeros(shape[0]) if grad is None else grad.clone()
    dist.all_reduce(total)
    return None if grad is None else total
