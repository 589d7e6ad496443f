# one loop for both phases, on a padded flat tensor
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    r, n = dist.get_rank(), dist.get_world_size()
    size = -(-x.numel() // n)
    flat = torch.zeros(size * n, dtype=x.dtype)
    flat[: x.numel()] = x.flatten()
    parts = list(flat.chunk(n))
    for k in range(2 * n - 2):
        got = torch.empty(size, dtype=x.dtype)
        w = dist.isend(parts[(r - k) % n].contiguous(), (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        w.wait()
        j = (r - k - 1) % n
        parts[j] = parts[j] + got if k < n - 1 else got
    return torch.cat(parts)[: x.numel()].view_as(x)
