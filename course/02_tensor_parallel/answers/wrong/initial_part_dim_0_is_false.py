# told: 0 and None
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w.chunk(tp_size, dim)[tp_rank] if dim else w
