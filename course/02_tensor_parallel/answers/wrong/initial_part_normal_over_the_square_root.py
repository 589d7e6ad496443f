# told: You changed std
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole / tp_size**0.5
    return whole.chunk(tp_size, dim)[tp_rank].contiguous()
