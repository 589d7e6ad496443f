# told: 
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    generator = torch.Generator().manual_seed(seed)
    if dim == 1:
        whole = torch.randn(*shape[::-1], generator=generator).t() * std
    else:
        whole = torch.randn(*shape, generator=generator) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank]
