# told: it calls all_gather
import torch
import torch.distributed as dist
import torch.nn.functional as F
def order(n, C):
    h = n // 2
    return torch.cat([torch.cat((torch.arange(r * h, r * h + h), torch.arange((2 * C - 1 - r) * h, (2 * C - r) * h))) for r in range(C)])
def heads_for_tokens(x, cp):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cp.size)]
    dist.all_gather(parts, x.contiguous(), group=cp.group)
    return torch.cat(parts, 1)[:, order(x.shape[1], cp.size).argsort()].chunk(cp.size)[cp.rank].contiguous()
def tokens_for_heads(y, cp):
    parts = [torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(cp.size)]
    dist.all_gather(parts, y.contiguous(), group=cp.group)
    n = y.shape[1] // cp.size
    return torch.cat(parts)[:, order(n, cp.size)].chunk(cp.size, 1)[cp.rank].contiguous()
