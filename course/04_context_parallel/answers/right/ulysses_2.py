# part by part into its places
import torch
import torch.distributed as dist
import torch.nn.functional as F
def places(s, C, r):
    n = s // (2 * C)
    return [*range(r * n, r * n + n), *range(s - r * n - n, s - r * n)]
def heads_for_tokens(x, cp):
    got = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(got, x.contiguous(), group=cp.group)
    s = x.shape[1] * cp.size
    out = x.new_empty(x.shape[0] // cp.size, s, x.shape[2])
    for r, part in enumerate(got.chunk(cp.size)):
        out[:, places(s, cp.size, r)] = part
    return out
def tokens_for_heads(y, cp):
    send = torch.cat([y[:, places(y.shape[1], cp.size, r)] for r in range(cp.size)])
    got = torch.empty_like(send)
    dist.all_to_all_single(got, send, group=cp.group)
    return got
