import torch
import torch.distributed as dist
def summed(x):
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts).sum(0)
def copy_to(x):
    y = x * 1
    if y.requires_grad:
        y.register_hook(summed)
    return y
def reduce_from(x):
    return x + (summed(x) - x).detach()
