# told: backwards
import torch


def positions(s, cp, rank):
    chunks = torch.arange(s).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank].flip(0)))
