# told: token by token
import torch


def positions(s, cp, rank):
    rounds = torch.arange(s).view(-1, 2 * cp)
    return rounds[:, [rank, 2 * cp - 1 - rank]].flatten()
