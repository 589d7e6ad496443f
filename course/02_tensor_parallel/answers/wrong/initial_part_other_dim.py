# told: other dim
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w if dim is None else w.chunk(tp_size, 1 - dim)[tp_rank]
