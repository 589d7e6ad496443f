from labkit.answers import Edit, Same

WRONG = [
    Edit("if dim is None", "if dim is None or tp_rank == 0"),
    Edit(" * std", "", told="times std"),
    Edit("chunk(tp_size, dim)", "chunk(tp_size, 0)", mistake="A matrix that is cut along dim 0 is not cut here: 0 and None are different things."),
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


# %% wrong: next numbers of one generator
# mistake: Each rank continues where the one before it stopped: that is right along dim 0 only.
import math

import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    size = math.prod(local)
    first = 0 if dim is None else tp_rank * size
    return torch.randn(math.prod(shape), generator=g)[first : first + size].view(local) * std


# %% wrong: none is dim 0
# mistake: A replicated matrix is cut: with dim None every rank holds all of it.
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w.chunk(tp_size, dim or 0)[tp_rank]


# %% wrong: normal over the square root
# mistake: You changed std: a part has the numbers of the serial matrix as they are, on any number of ranks.
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole / tp_size**0.5
    return whole.chunk(tp_size, dim)[tp_rank].contiguous()


# %% wrong: other dim
# mistake: The matrix is cut along the other dim: dim 0 are the rows.
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g) * std
    return w if dim is None else w.chunk(tp_size, 1 - dim)[tp_rank]


# %% wrong: own seed for every shard
# mistake: The shards differ now, but they are no parts of the serial matrix: the model changes with tp.
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    own = seed if dim is None else seed + tp_rank
    return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std


# %% wrong: replicas by rank
# mistake: A replicated matrix is another on each rank: its copies must be equal.
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    if dim is None:
        seed += tp_rank
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank]


# %% wrong: rows dealt out
# mistake: Rows or columns are dealt out to the ranks one by one: a rank holds a block of consecutive ones.
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole
    return whole[tp_rank::tp_size] if dim == 0 else whole[:, tp_rank::tp_size]


# %% wrong: same seed for every shard
# mistake: Every rank draws the same numbers, as in the careless version: all shards are equal.
import torch
def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    return torch.randn(*local, generator=torch.Generator().manual_seed(seed)) * std


# %% wrong: zeros elsewhere
# mistake: The rank's part stands in a whole matrix of zeros: return the part alone.
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
# %% wrong: changes the shape
import torch


def initial_part(shape, dim, tp_rank, tp_size, seed, std):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    if dim is None:
        return whole
    shape[dim] //= tp_size
    return whole.narrow(dim, tp_rank * shape[dim], shape[dim])


