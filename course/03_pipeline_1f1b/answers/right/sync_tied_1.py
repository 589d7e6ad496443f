# an exchange with the other copy
import torch
import torch.distributed as dist
def sync_tied(grad):
    last = dist.get_world_size() - 1
    if grad is None:
        return None
    other = last - dist.get_rank()
    got = torch.empty_like(grad)
    work = dist.isend(grad.contiguous(), other)
    dist.recv(got, other)
    work.wait()
    return grad + got
