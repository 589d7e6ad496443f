# told: sends parts that are not finished
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.contiguous().clone().flatten()
    parts = total.tensor_split(n)
    for step, k in enumerate([*range(n - 1), *range(n - 1)]):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if step < n - 1 else arriving)
    return total.view_as(x)
