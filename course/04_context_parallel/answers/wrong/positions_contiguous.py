# told: contiguous cut
import torch
def positions(s, cp, rank):
    return torch.arange(s).chunk(cp)[rank]
