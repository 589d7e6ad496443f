# the global generator, put back afterwards
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        whole = torch.randn(shape).mul_(std)
    if dim is None:
        return whole
    return torch.tensor_split(whole, tp_size, dim=dim)[tp_rank]
