from labkit.answers import Edit

_BOTH = "torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))"

WRONG = [
    Edit(_BOTH, "torch.arange(s // cp)",
         mistake="These are places on the rank. RoPE and the mask need places in the *whole* sequence."),
    Edit(_BOTH, "torch.arange(s).chunk(cp)[rank]",
         mistake="This is the contiguous cut: the last rank works most. Rank r holds chunks r and 2C-1-r of 2C."),
    Edit(_BOTH, "torch.arange(rank, s, cp)",
         mistake="Striped, token by token, is balanced too, nearly. Here the cut is in 2C chunks."),
    Edit("(chunks[rank], chunks[2 * cp - 1 - rank])", "(chunks[2 * cp - 1 - rank], chunks[rank])",
         mistake="The early chunk comes first, so that places ascend."),
    Edit("chunks[2 * cp - 1 - rank]", "chunks[2 * cp - 1 - rank].flip(0)",
         mistake="The late chunk stands backwards: places ascend in it, too."),
    Edit("2 * cp - 1 - rank", "cp + rank",
         mistake="The late chunk is counted from the end: rank 0 has the first chunk and the last."),
    Edit("chunks[2 * cp - 1 - rank]", "chunks[-rank] if rank else chunks[-1]"),
    Edit(_BOTH, f"{_BOTH}.float()"),
    Edit(_BOTH, f"{_BOTH}.tolist()", told="expected a tensor"),
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


# %% right: a numpy array
import numpy as np

def positions(s, cp, rank):
    chunks = np.array_split(np.arange(s), 2 * cp)
    return np.concatenate((chunks[rank], chunks[-1 - rank]))
