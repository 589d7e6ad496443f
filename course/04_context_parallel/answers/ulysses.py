from labkit.answers import Edit

WRONG = [
    Edit(".flip(0)", "", told="rank order, then the late ones in reverse"),
    Edit(
        "chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))",
        "chunks = halves.transpose(1, 2).flatten(0, 1)",
        mistake="The tokens arrive rank by rank, chunks 0, 2C-1, 1, 2C-2, ... Put them in the order of the " "sequence, and back on the way out.",
    ),
    Edit(
        "torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3)",
        "chunks.unflatten(0, (cp.size, 2)).transpose(1, 2).flatten(2, 3)",
        mistake="On the way back rank r gets chunks r and 2C-1-r, not a contiguous piece.",
    ),
    # empty like a view
    Edit("x, memory_format=torch.contiguous_format", "x"),
    # in two messages
    Edit(
        "arrived = torch.empty_like(x, memory_format=torch.contiguous_format)",
        """arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)""",
    ),
    # late chunks backwards inside
    Edit("halves[:, :, 1].flip(0)", "halves[:, :, 1].flip(0, 2)"),
    # of two ranks
    Edit(
        "unflatten(0, (cp.size, -1)).unflatten(2, (2, -1))  # [C, a/C, 2, n/2, d]",
        "unflatten(0, (2, -1)).unflatten(2, (2, -1))",
        (
            """chunks = y.unflatten(1, (2 * cp.size, -1)).transpose(0, 1)  # [2C, a/C, n/2, d]
    for_each = torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3).flatten(0, 1)""",
            """chunks = y.unflatten(1, (4, -1)).transpose(0, 1)
    for_each = torch.stack((chunks[:2], chunks[2:].flip(0)), dim=2).flatten(2, 3).flatten(0, 1)""",
        ),
    ),
    # one head a rank
    Edit(
        "arrived.unflatten(0, (cp.size, -1)).unflatten(2, (2, -1))  # [C, a/C, 2, n/2, d]",
        "arrived[:, None].unflatten(2, (2, -1))",
    ),
    # sends a view
    Edit("x.contiguous()", "x", mistake="On the way back rank r gets chunks r and 2C-1-r, not a contiguous piece."),
    # without the group
    Edit("contiguous(), group=cp.group", "contiguous()", ("for_each, group=cp.group", "for_each")),
]

RIGHT = [
    # the functional collective
    Edit(
        "dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)",
        """import torch.distributed._functional_collectives as fc
    arrived = fc.all_to_all_single(x.contiguous(), None, None, cp.group).clone()""",
    ),
]


# %% right: by places: sort what arrived
import torch
import torch.distributed as dist
import torch.nn.functional as F
def order(n, C):
    h = n // 2
    return torch.cat([torch.cat((torch.arange(r * h, r * h + h), torch.arange((2 * C - 1 - r) * h, (2 * C - r) * h))) for r in range(C)])
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


# %% right: part by part into its places
import torch
import torch.distributed as dist
import torch.nn.functional as F
def places(s, C, r):
    n = s // (2 * C)
    return [*range(r * n, r * n + n), *range(s - r * n - n, s - r * n)]
def heads_for_tokens(x, cp):
    got = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(got, x.contiguous(), group=cp.group)
    s = x.shape[1] * cp.size
    out = x.new_empty(x.shape[0] // cp.size, s, x.shape[2])
    for r, part in enumerate(got.chunk(cp.size)):
        out[:, places(s, cp.size, r)] = part
    return out
def tokens_for_heads(y, cp):
    send = torch.cat([y[:, places(y.shape[1], cp.size, r)] for r in range(cp.size)])
    got = torch.empty_like(send)
    dist.all_to_all_single(got, send, group=cp.group)
    return got


# %% right: lists of tensors
import torch
import torch.distributed as dist


def order(s, C):
    chunks = torch.arange(s).chunk(2 * C)
    return torch.cat([torch.cat((chunks[r], chunks[2 * C - 1 - r])) for r in range(C)])


def swap(pieces, like, cp):
    got = torch.empty_like(torch.cat(pieces))
    dist.all_to_all_single(got, torch.cat(pieces), group=cp.group)
    return got.chunk(cp.size)


def heads_for_tokens(x, cp):
    got = swap([p.contiguous() for p in x.chunk(cp.size)], x, cp)
    out = torch.empty_like(torch.cat(got, 1))
    out[:, order(out.shape[1], cp.size)] = torch.cat(got, 1)
    return out


def tokens_for_heads(y, cp):
    pieces = y[:, order(y.shape[1], cp.size)].chunk(cp.size, 1)
    return torch.cat(swap(list(pieces), y, cp))


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


# %% wrong: deals heads out
# mistake: You deal the heads one by one. Rank r gets a/C heads that stand next to each other.
import torch
import torch.distributed as dist


def order(s, C):
    chunks = torch.arange(s).chunk(2 * C)
    return torch.cat([torch.cat((chunks[r], chunks[2 * C - 1 - r])) for r in range(C)])


def heads_for_tokens(x, cp):
    x = x.unflatten(0, (-1, cp.size)).transpose(0, 1).flatten(0, 1).contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=cp.group)
    flat = torch.cat(out.chunk(cp.size), 1)
    return flat[:, order(flat.shape[1], cp.size).argsort()]


def tokens_for_heads(y, cp):
    send = torch.cat(y[:, order(y.shape[1], cp.size)].chunk(cp.size, 1))
    out = torch.empty_like(send)
    dist.all_to_all_single(out, send, group=cp.group)
    return out.unflatten(0, (cp.size, -1)).transpose(0, 1).flatten(0, 1)


# %% wrong: order for its inverse
# mistake: The two orders are exchanged: the list of the places that arrive takes tokens from the sequence; its argsort brings them into the sequence.
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
# %% wrong: as wide as the world
import torch
import torch.distributed as dist


def heads_for_tokens(x, cp):
    arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)
    halves = arrived.unflatten(0, (dist.get_world_size(), -1)).unflatten(2, (2, -1))
    chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))
    return chunks.transpose(0, 1).flatten(1, 2)


def tokens_for_heads(y, cp):
    chunks = y.unflatten(1, (2 * dist.get_world_size(), -1)).transpose(0, 1)
    for_each = torch.stack((chunks[: dist.get_world_size()], chunks[dist.get_world_size() :].flip(0)), dim=2).flatten(2, 3).flatten(0, 1)
    arrived = torch.empty_like(for_each)
    dist.all_to_all_single(arrived, for_each, group=cp.group)
    return arrived


# %% wrong: gathers instead
# told: it calls all_gather
import torch
import torch.distributed as dist
import torch.nn.functional as F
def order(n, C):
    h = n // 2
    return torch.cat([torch.cat((torch.arange(r * h, r * h + h), torch.arange((2 * C - 1 - r) * h, (2 * C - r) * h))) for r in range(C)])
def heads_for_tokens(x, cp):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cp.size)]
    dist.all_gather(parts, x.contiguous(), group=cp.group)
    return torch.cat(parts, 1)[:, order(x.shape[1], cp.size).argsort()].chunk(cp.size)[cp.rank].contiguous()
def tokens_for_heads(y, cp):
    parts = [torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(cp.size)]
    dist.all_gather(parts, y.contiguous(), group=cp.group)
    n = y.shape[1] // cp.size
    return torch.cat(parts)[:, order(n, cp.size)].chunk(cp.size, 1)[cp.rank].contiguous()


