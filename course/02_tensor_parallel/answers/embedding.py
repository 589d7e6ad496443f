from labkit.answers import Edit, Same

_MASKED = "the row that is looked up there is masked afterwards"

WRONG = [
    Edit(
        ".masked_fill(foreign.unsqueeze(-1), 0.0)",
        "",
        ("local.masked_fill(foreign, 0)", "local.clamp(0, weight.shape[0] - 1)"),
        mistake="Ids of other ranks must give zeros here; yours give some row of this rank's, which enters the " "sum.",
    ),
    Edit("return reduce_from_region(rows, tp)", "return rows", mistake="These are this rank's rows only: the tokens of other ranks are still zeros."),
    Edit("(local >= weight.shape[0])", "(local > weight.shape[0] - 2)", told="owned"),
]

EQUIVALENT = [
    Same("line 11: 1 for 0", _MASKED),
]


# %% right: rows by remainder, multiplied by zero where they are foreign
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def embedding(ids, weight, tp):
    n = len(weight)
    own = (ids // n) == tp.rank
    rows = weight[ids % n] * own.unsqueeze(-1)
    return reduce_from_region(rows, tp)


# %% right: masked_scatter into zeros
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def embedding(ids, weight, tp):
    n = len(weight)
    local = ids - tp.rank * n
    out = weight.new_zeros(*ids.shape, weight.shape[1])
    own = (local >= 0) & (local < n)
    out = out.masked_scatter(own.unsqueeze(-1), weight[local[own]])
    return reduce_from_region(out, tp)


# %% right: a one-hot product
import torch
from minimegatron.comm.collectives import reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    mine = torch.arange(tp.rank * n, (tp.rank + 1) * n)
    return reduce_from_region((ids[..., None] == mine).to(weight.dtype) @ weight, tp)


# %% right: a zero row in front of the table; a functional collective
import torch
import torch.distributed._functional_collectives as funcol


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        return funcol.all_reduce(x, "sum", tp.group).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def embedding(ids, weight, tp):
    local = (ids - tp.rank * weight.shape[0] + 1).clamp(0, weight.shape[0] + 1) % (weight.shape[0] + 1)
    table = torch.cat((torch.zeros_like(weight[:1]), weight))
    return Reduce.apply(table[local], tp)


# %% wrong: a repeated id counts once
# mistake: y is right, the gradient of the table is not: follow it back through what you did with the rows.
import torch
import torch.distributed as dist


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, tp):
        local = ids - tp.rank * weight.shape[0]
        own = (local >= 0) & (local < weight.shape[0])
        ctx.save_for_backward(local[own], own)
        ctx.shape = weight.shape
        rows = weight.new_zeros(*ids.shape, weight.shape[1])
        rows[own] = weight[local[own]]
        dist.all_reduce(rows, group=tp.group)
        return rows

    @staticmethod
    def backward(ctx, dy):
        local, own = ctx.saved_tensors
        dw = dy.new_zeros(ctx.shape)
        dw[local] = dy[own]
        return None, dw, None


def embedding(ids, weight, tp):
    return Lookup.apply(ids, weight, tp)


# %% wrong: f on the weight
# mistake: The gradient of the table is summed over ranks: each rank has other rows, and their gradient is complete.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    lo = tp.rank * n
    mine = (ids >= lo) & (ids < lo + n)
    w = copy_to_region(weight, tp)
    out = w[torch.where(mine, ids - lo, 0)] * mine.unsqueeze(-1)
    return reduce_from_region(out, tp)


# %% wrong: gradient summed too
# mistake: The gradient is summed once too often: it is the same on every rank already.
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    local = ids - tp.rank * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduce_from_region(copy_to_region(rows, tp), tp)


# %% wrong: ids dealt out
# mistake: Rank r owns a block of consecutive ids; yours are dealt out to the ranks one by one.
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def embedding(ids, weight, tp):
    own = ids % tp.size == tp.rank
    rows = F.embedding(ids // tp.size, weight)
    return reduce_from_region(rows.masked_fill(~own.unsqueeze(-1), 0.0), tp)


# %% wrong: largest over ranks
# mistake: You took the largest over ranks: beside a negative number of the row this is another rank's zero.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids, weight, tp):
    n = weight.shape[0]
    lo = tp.rank * n
    mine = (ids >= lo) & (ids < lo + n)
    out = weight[torch.where(mine, ids - lo, 0)] * mine.unsqueeze(-1)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=tp.group)
    return out


# %% wrong: by the rank in the world
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def embedding(ids, weight, tp):
    local = ids - dist.get_rank() * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduce_from_region(rows, tp)


# %% wrong: gathers the table
# told: never travels
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def embedding(ids, weight, tp):
    whole = c.gather_from_sequence_region(weight, tp, reduce_gradient=False)
    return F.embedding(ids, whole)


