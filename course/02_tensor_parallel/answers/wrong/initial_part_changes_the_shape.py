# told: 
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole
    shape[dim] //= tp_size
    return whole.narrow(dim, tp_rank * shape[dim], shape[dim])
