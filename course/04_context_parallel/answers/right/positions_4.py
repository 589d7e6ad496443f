# a mask of all places
import torch


def positions(s, cp, rank):
    chunk = torch.arange(s) // (s // (2 * cp))
    return torch.nonzero((chunk == rank) | (chunk == 2 * cp - 1 - rank)).squeeze(1)
