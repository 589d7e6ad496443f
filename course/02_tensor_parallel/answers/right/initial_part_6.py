# torch's own generator, put back afterwards
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        w = torch.randn(*shape) * std
    return w if dim is None else w.tensor_split(tp_size, dim)[tp_rank].clone()
