from labkit.answers import Edit

WRONG = [
    Edit("(chunks[rank], chunks[2 * cp - 1 - rank])", "(chunks[2 * cp - 1 - rank], chunks[rank])", mistake="The early chunk comes first, so that places ascend."),
    # as floats
    Edit("cat((chunks[rank], chunks[2 * cp - 1 - rank]))", "cat((chunks[rank], chunks[2 * cp - 1 - rank])).float()"),
    # late chunk backwards
    Edit("chunks[2 * cp - 1 - rank]", "chunks[2 * cp - 1 - rank].flip(0)", mistake="The late chunk stands backwards: places ascend in it, too."),
    # mirror off by one
    Edit("chunks[2 * cp - 1 - rank]", "chunks[-rank] if rank else chunks[-1]"),
    # of the next half
    Edit("2 * cp - 1 - rank", "cp + rank", mistake="The late chunk is counted from the end: rank 0 has the first chunk and the last."),
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


# %% right: a numpy array
import numpy as np


def positions(s, cp, rank):
    chunks = np.array_split(np.arange(s), 2 * cp)
    return np.concatenate((chunks[rank], chunks[-1 - rank]))


# %% wrong: contiguous
# mistake: This is the contiguous cut: the last rank works most. Rank r holds chunks r and 2C-1-r of 2C.
import torch
def positions(s, cp, rank):
    return torch.arange(s).chunk(cp)[rank]


# %% wrong: counted from the rank
# mistake: These are places on the rank. RoPE and the mask need places in the *whole* sequence.
import torch
def positions(s, cp, rank):
    return torch.arange(s // cp)


# %% wrong: striped
# mistake: Striped, token by token, is balanced too, nearly. Here the cut is in 2C chunks.
import torch
def positions(s, cp, rank):
    return torch.arange(rank, s, cp)


# %% wrong: as a list
# told: expected a tensor
def positions(s, cp, rank):
    n = s // (2 * cp)
    return [*range(rank * n, (rank + 1) * n), *range(s - (rank + 1) * n, s - rank * n)]


