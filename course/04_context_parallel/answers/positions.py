from labkit.answers import Edit

WRONG = [
    Edit("(chunks[rank], chunks[2 * cp - 1 - rank])", "(chunks[2 * cp - 1 - rank], chunks[rank])", told="comes first"),
    # as floats
    Edit("cat((chunks[rank], chunks[2 * cp - 1 - rank]))", "cat((chunks[rank], chunks[2 * cp - 1 - rank])).float()"),
    # late chunk backwards
    Edit("chunks[2 * cp - 1 - rank]", "chunks[2 * cp - 1 - rank].flip(0)", told="backwards"),
    # mirror off by one
    Edit("chunks[2 * cp - 1 - rank]", "chunks[-rank] if rank else chunks[-1]"),
    # of the next half
    Edit("2 * cp - 1 - rank", "cp + rank", told="counted from the end"),
    # two neighbours
    Edit("chunks[rank], chunks[2 * cp - 1 - rank]", "chunks[2 * rank], chunks[2 * rank + 1]"),
]


# %% right: two Python ranges
import torch
def positions(s, cp, rank):
    n = s // (2 * cp)
    return torch.tensor([*range(rank * n, rank * n + n), *range(s - rank * n - n, s - rank * n)])


# %% right: chunk numbers, folded, compared with the rank
import torch
def positions(s, cp, rank):
    c = torch.arange(s) // (s // (2 * cp))
    return torch.nonzero(torch.minimum(c, 2 * cp - 1 - c) == rank).flatten()


# %% right: two rows of a view
import torch
def positions(s, cp, rank):
    return torch.arange(s).view(2 * cp, -1)[[rank, -1 - rank]].reshape(-1)


# %% right: a mask of all places
import torch


def positions(s, cp, rank):
    chunk = torch.arange(s) // (s // (2 * cp))
    return torch.nonzero((chunk == rank) | (chunk == 2 * cp - 1 - rank)).squeeze(1)


# %% right: numpy
import numpy as np
import torch


def positions(s, cp, rank):
    n = s // (2 * cp)
    late = s - (rank + 1) * n
    return torch.from_numpy(np.r_[rank * n : rank * n + n, late : late + n].astype(np.int64))


# %% right: a numpy array
import numpy as np


def positions(s, cp, rank):
    chunks = np.array_split(np.arange(s), 2 * cp)
    return np.concatenate((chunks[rank], chunks[-1 - rank]))


# %% wrong: as a list
# told: expected a tensor
def positions(s, cp, rank):
    n = s // (2 * cp)
    return [*range(rank * n, (rank + 1) * n), *range(s - (rank + 1) * n, s - rank * n)]


# %% wrong: contiguous
# told: contiguous cut
import torch
def positions(s, cp, rank):
    return torch.arange(s).chunk(cp)[rank]


# %% wrong: counted from the rank
# told: places on the rank
import torch
def positions(s, cp, rank):
    return torch.arange(s // cp)


# %% wrong: striped
# told: Striped
import torch
def positions(s, cp, rank):
    return torch.arange(rank, s, cp)


# %% wrong: zigzag of single tokens
# told: token by token
import torch


def positions(s, cp, rank):
    rounds = torch.arange(s).view(-1, 2 * cp)
    return rounds[:, [rank, 2 * cp - 1 - rank]].flatten()
