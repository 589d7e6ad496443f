from labkit.answers import Edit

_TO_HEADS = "dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)"
_CHUNKS = "chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))"
_OUT = "torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3)"
_ARRIVE = "The tokens arrive rank by rank, chunks 0, 2C-1, 1, 2C-2, ... Put them in the order of the sequence."

WRONG = [
    Edit(_CHUNKS, "chunks = halves.transpose(1, 2).flatten(0, 1)", mistake=_ARRIVE),
    Edit(_CHUNKS, "chunks = halves.transpose(1, 2).flatten(0, 1)",
         (_OUT, "chunks.unflatten(0, (cp.size, 2)).transpose(1, 2).flatten(2, 3)"), mistake=_ARRIVE),
    Edit(_OUT, "chunks.unflatten(0, (cp.size, 2)).transpose(1, 2).flatten(2, 3)",
         mistake="On the way back rank r gets chunks r and 2C-1-r, not a contiguous piece."),
    Edit(".flip(0)", "",
         mistake="The late chunks are counted from the end: rank 0 holds the last of them, not the first."),
    Edit("x.contiguous()", "x.unflatten(0, (-1, cp.size)).transpose(0, 1).flatten(0, 1)",
         ("    return arrived", "    return arrived.unflatten(0, (cp.size, -1)).transpose(0, 1).flatten(0, 1)"),
         mistake="You deal the heads one by one. Rank r gets a/C heads that stand next to each other."),
    Edit("halves[:, :, 1].flip(0)", "halves[:, :, 1].flip(0, 2)"),
    Edit("x, memory_format=torch.contiguous_format", "x"),
    Edit("x.contiguous()", "x"),
    Edit(f"    {_TO_HEADS}", f"    {_TO_HEADS}\n    {_TO_HEADS}", told="calls all_to_all 3 times"),
    Edit("contiguous(), group=cp.group", "contiguous()", ("for_each, group=cp.group", "for_each"),
         told="each call names its group"),
    # as wide as the world
    Edit("cp.size", "dist.get_world_size()"),
    # of two ranks
    Edit("cp.size", "2"),
    Edit(f"    {_TO_HEADS}", "    every = [torch.empty_like(arrived) for _ in range(cp.size)]\n"
         "    dist.all_gather(every, x.contiguous(), group=cp.group)\n"
         "    arrived = torch.cat([one.chunk(cp.size)[cp.rank] for one in every])", told="it calls all_gather"),
]

RIGHT = [
    # the functional collective
    Edit(_TO_HEADS, "import torch.distributed._functional_collectives as fc\n"
         "    arrived = fc.all_to_all_single(x.contiguous(), None, None, cp.group).clone()"),
]


# %% right: by places: sort what arrived
import torch
import torch.distributed as dist

def order(n, C):
    h = n // 2
    late = [torch.arange((2 * C - 1 - r) * h, (2 * C - r) * h) for r in range(C)]
    return torch.cat([torch.cat((torch.arange(r * h, r * h + h), late[r])) for r in range(C)])

def heads_for_tokens(x, cp):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=cp.group)
    flat = torch.cat(out.chunk(cp.size), 1)
    return flat[:, order(x.shape[1], cp.size).argsort()]

def tokens_for_heads(y, cp):
    n = y.shape[1] // cp.size
    parts = y[:, order(n, cp.size)].chunk(cp.size, 1)
    send = torch.cat(parts)
    out = torch.empty_like(send)
    dist.all_to_all_single(out, send, group=cp.group)
    return out


# %% right: the package's all_to_all; numpy for the order
import numpy as np
import torch
from minimegatron.comm.collectives import all_to_all

def order(s, C):
    chunks = np.arange(s).reshape(2 * C, -1)
    return torch.from_numpy(np.concatenate([chunks[[r, 2 * C - 1 - r]].ravel() for r in range(C)]))

def heads_for_tokens(x, cp):
    got = torch.cat(all_to_all(x, cp).chunk(cp.size), 1)
    return got[:, order(got.shape[1], cp.size).argsort()]

def tokens_for_heads(y, cp):
    return all_to_all(torch.cat(y[:, order(y.shape[1], cp.size)].chunk(cp.size, 1)), cp)


# %% wrong: order for its inverse
# mistake: The two orders are exchanged: the list of places takes tokens out of the sequence, its argsort puts them in.
import torch
import torch.distributed as dist
from exercises.positions import positions

def heads_for_tokens(x, cp):
    a, n, d = x.shape; C = cp.size; x = x.contiguous(); got = torch.empty_like(x)
    dist.all_to_all_single(got, x, group=cp.group)
    y = torch.cat(got.chunk(C), 1)
    return y[:, torch.cat([positions(C * n, C, r) for r in range(C)])]

def tokens_for_heads(y, cp):
    C = cp.size
    o = torch.cat([positions(y.shape[1], C, r) for r in range(C)]).argsort()
    x = torch.cat(y[:, o].chunk(C, 1)); got = torch.empty_like(x)
    dist.all_to_all_single(got, x, group=cp.group)
    return got
