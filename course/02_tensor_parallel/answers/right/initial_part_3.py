# normal_ into an empty tensor, and torch.split
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    w = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed)) * std
    return torch.split(w, shape[dim] // tp_size, dim)[tp_rank] if dim is not None else w
