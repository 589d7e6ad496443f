from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "all_reduce(expert.clone(), edp) / every",
        "all_reduce(expert.clone(), edp) / all_reduce(torch.tensor(float(tokens)), edp)",
        told="the tokens of edp alone",
    ),
    # the tokens are counted twice
    Edit(
        "    return all",
        """    again = all_reduce(torch.tensor(float(tokens)), dp)
    return all""",
        ("edp) / every", "edp) / again"),
        told="summed 2 times",
    ),
    Edit("edp) / every", "edp) / every / edp.size", told="by a number of ranks"),
    Edit("edp) / every", "edp) / every * edp.size / dp.size", told="by a number of ranks"),
    Edit("edp) / every", "edp) / every / dp.size", told="by a number of ranks"),
    Edit("all_reduce(expert.clone(), edp)", "all_reduce(expert.clone(), dp)", told="*different* experts"),
    Edit("all_reduce(expert.clone(), edp)", "expert", told="saw other tokens"),
    Edit("all_reduce(dense.clone(), dp) / every", "all_reduce(dense / tokens, dp) / dp.size", told="mean of means"),
    Edit(" / every", "", told="not divided yet"),
    Edit(
        "every = all_reduce(torch.tensor(float(tokens)), dp)",
        "every = tokens * dp.size",
        told="the ranks differ | hidden",
    ),
    Edit("all_reduce(dense.clone(), dp)", "all_reduce(dense.clone(), edp)", told="only those of edp"),
    Edit("all_reduce(dense.clone(), dp)", "dense"),
    Edit("edp) / every", "edp) / every * (dp.size / edp.size)"),
    Edit(
        "all_reduce(torch.tensor(float(tokens)), dp)",
        "all_reduce(torch.tensor(float(tokens)), edp) * (dp.size / edp.size)",
    ),
    Edit("all_reduce(torch.tensor(float(tokens)), dp)", "all_reduce(torch.tensor(float(tokens)), dp, 'max')"),
    # every rank gathers all gradients
    Edit(
        "    every =",
        """    import torch.distributed as dist
    whole = [torch.empty_like(dense) for _ in range(dp.size)]
    dist.all_gather(whole, dense.contiguous(), group=dp.group)
    dense = sum(whole) / dp.size
    every =""",
    ),
]

EQUIVALENT = [
    Same("line 11: `.clone()` dropped", "gradients may be summed in place"),
    Same("line 11: `.clone()` dropped (2)", "gradients may be summed in place"),
]


# %% right: in place, the count in int64
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def finish(dense, expert, tokens, dp, edp):
    n = torch.tensor([tokens])
    dist.all_reduce(n, group=dp.group)
    all_reduce(dense, dp)
    all_reduce(expert, edp)
    return dense / n, expert / n


# %% right: in terms of means: over edp, times edp/dp, by the mean count
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def finish(dense, expert, tokens, dp, edp):
    mean = all_reduce(torch.tensor(tokens / dp.size), dp)
    d = all_reduce(dense / dp.size, dp) / mean
    e = all_reduce(expert / edp.size, edp) * (edp.size / dp.size) / mean
    return d, e


# %% right: one message for all of dp, functional collectives
import torch
from torch.distributed._functional_collectives import all_reduce


def finish(dense, expert, tokens, dp, edp):
    flat = torch.cat((dense.double(), torch.tensor([tokens], dtype=torch.float64)))
    if dp.size > 1:
        flat = all_reduce(flat, "sum", dp.group) + 0
    e = all_reduce(expert, "sum", edp.group) + 0 if edp.size > 1 else expert
    return (flat[:-1] / flat[-1]).to(dense.dtype), e / flat[-1].to(e.dtype)


# %% right: torch.distributed.nn, the tokens by an all-gather of objects
import torch.distributed as dist
from torch.distributed.nn import all_reduce


def finish(dense, expert, tokens, dp, edp):
    every = [None] * dp.size
    if dp.group is None:
        every = [tokens]
    else:
        dist.all_gather_object(every, tokens, group=dp.group)
        dense = all_reduce(dense.contiguous(), group=dp.group)
    if edp.size > 1:
        expert = all_reduce(expert.contiguous(), group=edp.group)
    return dense / sum(every), expert / sum(every)


# %% right: reduce-scatter and all-gather in place of an all-reduce
import torch
import torch.distributed as dist


def total(x, axis):
    if axis.size == 1:
        return x
    padded = torch.cat((x, x.new_zeros(-len(x) % axis.size)))
    part = x.new_empty(len(padded) // axis.size)
    dist.reduce_scatter(part, list(padded.chunk(axis.size)), group=axis.group)
    whole = [torch.empty_like(part) for _ in range(axis.size)]
    dist.all_gather(whole, part, group=axis.group)
    return torch.cat(whole)[: len(x)]


def finish(dense, expert, tokens, dp, edp):
    n = total(torch.tensor([float(tokens)]), dp).item()
    return total(dense, dp) / n, total(expert, edp) / n


# %% right: divides by the mean number of tokens, then averages
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    """Divide first by the mean number of tokens, then average."""
    n = all_reduce(torch.tensor([tokens], dtype=torch.float64), dp)
    mean = n / dp.size
    dense = all_reduce(dense / dp.size, dp)
    expert = all_reduce(expert / dp.size, edp)
    return (dense / mean).to(dense.dtype), (expert / mean).to(expert.dtype)


# %% wrong: all in one message
# told: *different* experts
# one all-reduce of everything: over dp, where experts differ
import torch

from minimegatron.comm.collectives import all_reduce


def finish(dense, expert, tokens, dp, edp):
    every = all_reduce(torch.cat([dense, expert, dense.new_tensor([float(tokens)])]), dp)
    return every[: len(dense)] / every[-1], every[len(dense) : -1] / every[-1]


# %% wrong: axes exchanged
# told: axes are exchanged
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    n = all_reduce(torch.tensor(float(tokens)), dp)
    return all_reduce(dense, edp) / n, all_reduce(expert, dp) / n


# %% wrong: group of one is all ranks
# told: *different* experts
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import all_reduce
def finish(dense, expert, tokens, dp, edp):
    n = torch.tensor(float(tokens))
    dist.all_reduce(n, group=dp.group)
    dist.all_reduce(dense, group=dp.group)
    dist.all_reduce(expert, group=edp.group)
    return dense / n, expert / n


# %% wrong: idle rank returns
# told: takes part, too
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    if tokens == 0:
        return dense, expert
    n = all_reduce(torch.tensor(float(tokens)), dp)
    return all_reduce(dense, dp) / n, all_reduce(expert, edp) / n


# %% wrong: own tokens
# told: this rank's tokens
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    return all_reduce(dense, dp) / tokens, all_reduce(expert, edp) / tokens


# %% wrong: tokens of edp times ep
# told: as many as any other
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    n = all_reduce(torch.tensor(float(tokens)), dp)
    m = all_reduce(torch.tensor(float(tokens)), edp) * (dp.size / edp.size)
    return all_reduce(dense, dp) / n, all_reduce(expert, edp) / m
