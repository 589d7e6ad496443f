# told: shape
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(2 * (n - 1)):
        receive = (rank - k - 1) % n
        box = torch.empty_like(parts[receive])
        work = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        work.wait()
        parts[receive].copy_(box + parts[receive] if k < n - 1 else box)
    return y
