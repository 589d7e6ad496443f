from labkit.answers import Edit, Same

WRONG = [
    Edit("if dim is None", "if dim is None or tp_rank == 0"),
    Edit(" * std", "", told="times std"),
    Edit("chunk(tp_size, dim)", "chunk(tp_size, 0)", told="along dim"),
]

EQUIVALENT = [
    Same("line 8: `.contiguous()` dropped", "a view has the same numbers"),
]


# %% right: narrow cuts the shard
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g).mul(std)
    if dim is None:
        return w
    n = shape[dim] // tp_size
    return w.narrow(dim, tp_rank * n, n)


# %% right: torch's global seed, and tensor_split
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    torch.manual_seed(seed)
    w = std * torch.randn(shape)
    return w if dim is None else w.tensor_split(tp_size, dim)[tp_rank].clone()


# %% right: normal_ into an empty tensor, and torch.split
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    w = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed)) * std
    return torch.split(w, shape[dim] // tp_size, dim)[tp_rank] if dim is not None else w


# %% right: the global generator, put back afterwards
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        whole = torch.randn(shape).mul_(std)
    if dim is None:
        return whole
    return torch.tensor_split(whole, tp_size, dim=dim)[tp_rank]


# %% right: indices of the rows or columns
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    generator = torch.Generator()
    generator.manual_seed(seed)
    matrix = std * torch.randn(tuple(shape), generator=generator)
    if dim is None:
        return matrix
    each = shape[dim] // tp_size
    return matrix.index_select(dim, torch.arange(tp_rank * each, tp_rank * each + each))


# %% right: torch's own generator, put back afterwards
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        w = torch.randn(*shape) * std
    return w if dim is None else w.tensor_split(tp_size, dim)[tp_rank].clone()


# %% wrong: changes the shape
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole
    shape[dim] //= tp_size
    return whole.narrow(dim, tp_rank * shape[dim], shape[dim])


# %% wrong: dim 0 is false
# told: 0 and None
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w.chunk(tp_size, dim)[tp_rank] if dim else w


# %% wrong: next numbers of one generator
# told: that is right along dim 0 only
import math

import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    size = math.prod(local)
    first = 0 if dim is None else tp_rank * size
    return torch.randn(math.prod(shape), generator=g)[first : first + size].view(local) * std


# %% wrong: none is dim 0
# told: replicated matrix is cut
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w.chunk(tp_size, dim or 0)[tp_rank]


# %% wrong: normal over the square root
# told: You changed std
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole / tp_size**0.5
    return whole.chunk(tp_size, dim)[tp_rank].contiguous()


# %% wrong: other dim
# told: other dim
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w if dim is None else w.chunk(tp_size, 1 - dim)[tp_rank]


# %% wrong: own seed for every shard
# told: changes with tp
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    own = seed if dim is None else seed + tp_rank
    return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std


# %% wrong: replicas by rank
# told: another on each rank
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    if dim is None:
        seed += tp_rank
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank]


# %% wrong: rows dealt out
# told: dealt out
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole
    return whole[tp_rank::tp_size] if dim == 0 else whole[:, tp_rank::tp_size]


# %% wrong: same seed for every shard
# told: all shards are equal
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    return torch.randn(*local, generator=torch.Generator().manual_seed(seed)) * std


# %% wrong: transposed columns
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    generator = torch.Generator().manual_seed(seed)
    if dim == 1:
        whole = torch.randn(*shape[::-1], generator=generator).t() * std
    else:
        whole = torch.randn(*shape, generator=generator) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank]


# %% wrong: zeros elsewhere
# told: matrix of zeros
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    if dim is None:
        return w
    out = torch.zeros_like(w)
    n = shape[dim] // tp_size
    out.narrow(dim, tp_rank * n, n).copy_(w.narrow(dim, tp_rank * n, n))
    return out
