# told: still adds
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(2 * (n - 1)):
        box = torch.empty_like(parts[(rank - k - 1) % n])
        work = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        work.wait()
        parts[(rank - k - 1) % n].add_(box)
    return y.view_as(x)
