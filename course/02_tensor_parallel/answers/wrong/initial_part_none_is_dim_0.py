# told: replicated matrix is cut
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w.chunk(tp_size, dim or 0)[tp_rank]
