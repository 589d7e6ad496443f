# torch's global seed, and tensor_split
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    torch.manual_seed(seed)
    w = std * torch.randn(shape)
    return w if dim is None else w.tensor_split(tp_size, dim)[tp_rank].clone()
