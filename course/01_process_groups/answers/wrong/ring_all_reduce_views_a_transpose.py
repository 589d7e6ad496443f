# told: view size is not compatible
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    out = x.clone()
    parts = out.view(-1).tensor_split(n)
    for k in range(2 * n - 2):
        receive = (rank - k - 1) % n
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[(rank - k) % n].clone(), (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        sending.wait()
        parts[receive].copy_(parts[receive] + arriving if k < n - 1 else arriving)
    return out
