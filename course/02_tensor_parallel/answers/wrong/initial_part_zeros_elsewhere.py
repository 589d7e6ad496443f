# told: matrix of zeros
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    if dim is None:
        return w
    out = torch.zeros_like(w)
    n = shape[dim] // tp_size
    out.narrow(dim, tp_rank * n, n).copy_(w.narrow(dim, tp_rank * n, n))
    return out
