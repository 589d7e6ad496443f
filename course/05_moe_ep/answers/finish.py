from labkit.answers import Edit, Same

WRONG = [
    Edit(
        "all_reduce(expert.clone(), edp) / every",
        "all_reduce(expert.clone(), edp) / all_reduce(torch.tensor(float(tokens)), edp)",
        mistake="The experts are divided by the tokens of edp alone. Tokens of *all* ranks reached them, through " "the all-to-all.",
    ),
    # the tokens are counted twice
    Edit(
        "    return all",
        """    again = all_reduce(torch.tensor(float(tokens)), dp)
    return all""",
        ("edp) / every", "edp) / again"),
        told="summed 2 times",
    ),
    Edit("edp) / every", "edp) / every / edp.size", mistake="The experts are divided once too often, by a number of ranks."),
    Edit("edp) / every", "edp) / every * edp.size / dp.size", mistake="The experts are divided once too often, by a number of ranks."),
    Edit("edp) / every", "edp) / every / dp.size", told="by a number of ranks"),
    Edit("all_reduce(expert.clone(), edp)", "all_reduce(expert.clone(), dp)", mistake="Ranks of one ep group hold *different* experts. Here their gradients are added to each other."),
    Edit("all_reduce(expert.clone(), edp)", "expert", mistake="Ranks of edp hold the same experts and saw other tokens, and here each keeps its own gradient."),
    Edit("all_reduce(dense.clone(), dp) / every", "all_reduce(dense / tokens, dp) / dp.size", mistake="A mean of means: ranks with few tokens count too much."),
    Edit(" / every", "", mistake="The sums are not divided yet."),
    Edit(
        "every = all_reduce(torch.tensor(float(tokens)), dp)",
        "every = tokens * dp.size",
        told="the ranks differ | hidden",
    ),
    Edit("all_reduce(dense.clone(), dp)", "all_reduce(dense.clone(), edp)", mistake="Every rank of dp holds a copy of the dense weights. Here only those of edp are summed."),
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


# %% wrong: axes exchanged
# mistake: The two axes are exchanged: every rank of dp holds a copy of the dense weights, every rank of edp one of these experts.
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    n = all_reduce(torch.tensor(float(tokens)), dp)
    return all_reduce(dense, edp) / n, all_reduce(expert, dp) / n


# %% wrong: own tokens
# mistake: The sums are divided by a number made of this rank's tokens. The other ranks have other numbers.
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    return all_reduce(dense, dp) / tokens, all_reduce(expert, edp) / tokens


# %% wrong: tokens of edp times ep
# mistake: The tokens of edp times ep are those of all ranks only where each rank has as many as any other.
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    n = all_reduce(torch.tensor(float(tokens)), dp)
    m = all_reduce(torch.tensor(float(tokens)), edp) * (dp.size / edp.size)
    return all_reduce(dense, dp) / n, all_reduce(expert, edp) / m
# %% wrong: idle rank returns
# told: takes part, too
import torch
from minimegatron.comm.collectives import all_reduce

def finish(dense, expert, tokens, dp, edp):
    if tokens == 0:
        return dense, expert
    n = all_reduce(torch.tensor(float(tokens)), dp)
    return all_reduce(dense, dp) / n, all_reduce(expert, edp) / n


