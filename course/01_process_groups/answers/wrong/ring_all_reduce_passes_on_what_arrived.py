# told: without this rank's own numbers
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    # sends on what has arrived, not the sum
    N, r = dist.get_world_size(), dist.get_rank()
    out = x.clone(memory_format=torch.contiguous_format)
    parts = out.view(-1).tensor_split(N)
    going = parts[r].clone()
    for k in range(N - 1):
        b = parts[(r - k - 1) % N]
        got = torch.empty_like(b)
        w = dist.isend(going, (r + 1) % N); dist.recv(got, (r - 1) % N); w.wait()
        b += got
        going = got
    for k in range(N - 1):
        a, b = parts[(r + 1 - k) % N], parts[(r - k) % N]
        got = torch.empty_like(b)
        w = dist.isend(a, (r + 1) % N); dist.recv(got, (r - 1) % N); w.wait()
        b.copy_(got)
    return out
