# told: Phase
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    r, n, total, moving = dist.get_rank(), dist.get_world_size(), x.clone(), x
    for _ in range(n - 1):
        got = torch.empty_like(x)
        w = dist.isend(moving, (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        w.wait()
        total, moving = total + got, got
    return total
