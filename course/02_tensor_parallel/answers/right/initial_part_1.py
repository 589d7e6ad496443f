# narrow cuts the shard
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g).mul(std)
    if dim is None:
        return w
    n = shape[dim] // tp_size
    return w.narrow(dim, tp_rank * n, n)
