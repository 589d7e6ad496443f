# told: all shards are equal
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    return torch.randn(*local, generator=torch.Generator().manual_seed(seed)) * std
