# lists of tensors
import torch
import torch.distributed as dist


def order(s, C):
    chunks = torch.arange(s).chunk(2 * C)
    return torch.cat([torch.cat((chunks[r], chunks[2 * C - 1 - r])) for r in range(C)])


def swap(pieces, like, cp):
    got = torch.empty_like(torch.cat(pieces))
    dist.all_to_all_single(got, torch.cat(pieces), group=cp.group)
    return got.chunk(cp.size)


def heads_for_tokens(x, cp):
    got = swap([p.contiguous() for p in x.chunk(cp.size)], x, cp)
    out = torch.empty_like(torch.cat(got, 1))
    out[:, order(out.shape[1], cp.size)] = torch.cat(got, 1)
    return out


def tokens_for_heads(y, cp):
    pieces = y[:, order(y.shape[1], cp.size)].chunk(cp.size, 1)
    return torch.cat(swap(list(pieces), y, cp))
