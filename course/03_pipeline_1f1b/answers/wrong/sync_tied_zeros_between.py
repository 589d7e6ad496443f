# told: holds no copy | expected None
import torch
import torch.distributed as dist
def sync_tied(grad):
    n = dist.get_world_size()
    size = torch.tensor([0, 0] if grad is None else list(grad.shape))
    dist.broadcast(size, 0)
    total = torch.zeros(size.tolist()) if grad is None else grad.contiguous().clone()
    dist.all_reduce(total)
    return None if grad is None else total.to(grad.dtype)
