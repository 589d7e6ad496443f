# two generators, one for each phase; every second number is a part
import torch
import torch.distributed as dist
def ring_all_reduce(x):
    n, r = dist.get_world_size(), dist.get_rank()
    y = x.contiguous().view(-1)
    parts = [y[i::n].clone() for i in range(n)]
    def steps(first):
        for k in range(n - 1):
            yield (r + first - k) % n, (r + first - 1 - k) % n
    def swap(send, receive):
        box = parts[receive].new_empty(parts[receive].shape)
        work = dist.isend(parts[send], (r + 1) % n)
        dist.recv(box, (r - 1) % n)
        work.wait()
        return box
    for send, receive in steps(0):
        parts[receive] = swap(send, receive) + parts[receive]
    for send, receive in steps(1):
        parts[receive] = swap(send, receive)
    out = torch.empty_like(y)
    for i, part in enumerate(parts):
        out[i::n] = part
    return out.view(x.shape)
