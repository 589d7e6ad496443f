# told: IndexError
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    total = x.clone().flatten()
    parts = total.chunk(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), right)
        dist.recv(arriving, left)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return total.view_as(x)
