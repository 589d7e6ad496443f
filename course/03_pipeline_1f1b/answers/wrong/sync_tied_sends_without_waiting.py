# told: never waits for its irecv | never waits for its recv
import torch
import torch.distributed as dist


def sync_tied(grad):
    if grad is None:
        return None
    other = dist.get_world_size() - 1 - dist.get_rank()
    came = torch.zeros_like(grad)
    dist.isend(grad, other)
    dist.irecv(came, other)
    return grad + came
