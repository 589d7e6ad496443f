# told: the one on the last rank
import torch
import torch.distributed as dist
def sync_tied(grad):
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(grad.contiguous(), last)
    elif dist.get_rank() == last:
        got = torch.empty(grad.shape, dtype=grad.dtype)
        dist.recv(got, 0)
        return grad + got
    return grad
