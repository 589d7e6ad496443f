# indices of the rows or columns
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    generator = torch.Generator()
    generator.manual_seed(seed)
    matrix = std * torch.randn(tuple(shape), generator=generator)
    if dim is None:
        return matrix
    each = shape[dim] // tp_size
    return matrix.index_select(dim, torch.arange(tp_rank * each, tp_rank * each + each))
