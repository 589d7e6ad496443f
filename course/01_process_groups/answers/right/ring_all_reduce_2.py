# names imported one by one; the first parts are shorter, the last takes the rest
import torch
from torch.distributed import get_rank, get_world_size, irecv, isend
def ring_all_reduce(x):
    me, n = get_rank(), get_world_size()
    flat = x.reshape(-1).clone()
    size = flat.numel() // n
    cuts = [slice(i * size, (i + 1) * size if i < n - 1 else None) for i in range(n)]
    for k in range(2 * (n - 1)):
        give, take = cuts[(me - k) % n], cuts[(me - k - 1) % n]
        came = torch.zeros_like(flat[take])
        works = [isend(flat[give].clone(), dst=(me + 1) % n), irecv(came, src=(me - 1) % n)]
        for work in works:
            work.wait()
        flat[take] = flat[take] + came if k < n - 1 else came
    return flat.reshape(x.shape)
