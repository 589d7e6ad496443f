import torch


def positions(s, cp, rank):
    return torch.arange(s).view(2 * cp, -1)[[rank, 2 * cp - 1 - rank]].flatten()
