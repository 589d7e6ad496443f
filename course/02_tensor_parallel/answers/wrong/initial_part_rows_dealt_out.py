# told: dealt out
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole
    return whole[tp_rank::tp_size] if dim == 0 else whole[:, tp_rank::tp_size]
