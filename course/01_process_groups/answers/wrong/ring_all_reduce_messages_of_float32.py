# told: another dtype
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    N, r = dist.get_world_size(), dist.get_rank()
    out = x.clone(memory_format=torch.contiguous_format)
    parts = out.view(-1).tensor_split(N)
    for k in range(2 * N - 2):
        a, b = parts[(r - k) % N], parts[(r - k - 1) % N]
        got = torch.empty(b.shape)
        w = dist.isend(a.float(), (r + 1) % N); dist.recv(got, (r - 1) % N); w.wait()
        if k < N - 1:
            b += got
        else:
            b.copy_(got)
    return out
