# told: places on the rank
import torch
def positions(s, cp, rank):
    return torch.arange(s // cp)
