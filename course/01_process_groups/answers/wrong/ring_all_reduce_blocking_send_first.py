# told: deadlock: rank 0 waits in send
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    y = x.clone().flatten()
    parts = y.tensor_split(n)
    for k in range(2 * (n - 1)):
        receive = (rank - k - 1) % n
        box = torch.empty_like(parts[receive])
        dist.send(parts[(rank - k) % n], (rank + 1) % n)
        dist.recv(box, (rank - 1) % n)
        parts[receive].copy_(box + parts[receive] if k < n - 1 else box)
    return y.view_as(x)
