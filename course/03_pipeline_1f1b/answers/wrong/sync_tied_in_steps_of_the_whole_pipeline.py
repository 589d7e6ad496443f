# told: holds no copy
# the gradient is passed on from rank to rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    n, r = dist.get_world_size(), dist.get_rank()
    if n == 2:
        total = grad.clone()
        dist.all_reduce(total)
        return total
    shape = [None]
    box = [None if grad is None else grad.contiguous()]
    for root in (0, n - 1):
        box = [grad if r == root else None]
        dist.broadcast_object_list(box, src=root)
        shape.append(box[0])
    return None if grad is None else shape[1] + shape[2]
