# told: gets the other's gradient here
import torch
import torch.distributed as dist


def sync_tied(grad):
    if grad is None:
        return None
    other = dist.get_world_size() - 1 - dist.get_rank()
    got = torch.empty_like(grad)
    for message in [dist.isend(grad, other), dist.irecv(got, other)]:
        message.wait()
    return got
