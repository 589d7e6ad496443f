# a batch of one send and one receive
import torch
import torch.distributed as dist
def sync_tied(grad):
    n, r = dist.get_world_size(), dist.get_rank()
    if grad is None:
        return None
    came, other = torch.empty(grad.shape, dtype=grad.dtype), n - 1 - r
    ops = [dist.P2POp(dist.isend, grad.contiguous(), other), dist.P2POp(dist.irecv, came, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return came + grad
