# told: another on each rank
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    if dim is None:
        seed += tp_rank
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank]
