# told: changes with tp
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    own = seed if dim is None else seed + tp_rank
    return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std
