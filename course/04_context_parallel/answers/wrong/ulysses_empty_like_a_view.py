# told: 
import torch
import torch.distributed as dist


def heads_for_tokens(x, cp):
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)
    halves = arrived.unflatten(0, (cp.size, -1)).unflatten(2, (2, -1))
    chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))
    return chunks.transpose(0, 1).flatten(1, 2)


def tokens_for_heads(y, cp):
    chunks = y.unflatten(1, (2 * cp.size, -1)).transpose(0, 1)
    for_each = torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3).flatten(0, 1)
    arrived = torch.empty_like(for_each)
    dist.all_to_all_single(arrived, for_each, group=cp.group)
    return arrived
