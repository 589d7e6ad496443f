# a group of the two ends, and an all-gather
import torch
import torch.distributed as dist
def sync_tied(grad):
    ends = [0, dist.get_world_size() - 1]
    group = dist.new_group(ends)
    if dist.get_rank() not in ends:
        return grad
    both = [torch.empty_like(grad) for _ in ends]
    dist.all_gather(both, grad, group=group)
    return both[0] + both[1]
