from labkit.answers import Edit

WRONG = [
    Edit(
        "F.linear(x, weight)",
        "F.linear(x, weight, bias)",
        ("return y if bias is None else y + bias", "return y"),
        told="t biases",
    ),
    Edit("reduce_from_region(F.linear(x, weight), tp)", "F.linear(x, weight)", told="partial sum"),
    Edit(
        "reduce_from_region(F.linear(x, weight), tp)",
        "reduce_from_region(copy_to_region(F.linear(x, weight), tp), tp)",
        told="once too often",
    ),
]


# %% right: a product in place of F.linear
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def row_linear(x, weight, bias, tp):
    y = reduce_from_region(x @ weight.t(), tp)
    return y + bias if bias is not None else y


# %% right: the bias is added by torch.add
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def row_linear(x, weight, bias, tp):
    mine = bias if tp.rank == 0 else None
    y = reduce_from_region(F.linear(x, weight), tp)
    return y if bias is None else torch.add(y, bias)


# %% right: the sum as a detached correction, in place of g
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def row_linear(x, weight, bias, tp):
    y = F.linear(x, weight)
    total = y.detach().clone()
    dist.all_reduce(total, group=tp.group)
    y = y + (total - y.detach())
    return y if bias is None else y + bias


# %% right: a functional collective in a Function
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        return funcol.all_reduce(x, "sum", tp.group).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(F.linear(x, weight), tp)
    return y if bias is None else y + bias


# %% right: matmul, a coalescing-free async sum, the bias in place
import torch
from torch.distributed import ReduceOp, all_reduce


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        out = x.contiguous().clone()
        work = all_reduce(out, ReduceOp.SUM, tp.group, True)
        work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(torch.matmul(x, weight.mT), tp)
    if bias is not None:
        y = y.add(bias)
    return y


# %% right: the sum of the others added as a constant
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = F.linear(x, weight)
    total = y.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    y = y + (total - y.detach())
    return y if bias is None else y + bias


# %% wrong: a share of the bias on each
# told: Only the bias's gradient
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def row_linear(x, weight, bias, tp):
    return reduce_from_region(F.linear(x, weight, None if bias is None else bias / tp.size), tp)


# %% wrong: bias detached
# told: Only the bias's gradient
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(x, weight), tp)
    return y if bias is None else y + bias.detach() + 0 * bias


# %% wrong: bias f
# told: bias's gradient is summed
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(x, weight), tp)
    return y if bias is None else y + copy_to_region(bias, tp)


# %% wrong: bias on the first rank
# told: Only the bias's gradient
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def row_linear(x, weight, bias, tp):
    return reduce_from_region(F.linear(x, weight, bias if tp.rank == 0 else None), tp)


# %% wrong: f and g around it
# told: dx is summed over ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(copy_to_region(x, tp), weight), tp)
    return y if bias is None else y + bias


# %% wrong: f in place of g
# told: partial sum of y
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region


def row_linear(x, weight, bias, tp):
    y = copy_to_region(F.linear(x, weight), tp)
    return y if bias is None else y + bias


# %% wrong: gathers then sums
# told: an all-reduce
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def row_linear(x, weight, bias, tp):
    parts = gather_from_region(F.linear(x, weight), tp)
    y = sum(parts.chunk(tp.size, -1))
    return y if bias is None else y + bias


# %% wrong: ignores the group
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(F.linear(x, weight), tp)
    return y if bias is None else y + bias


# %% wrong: mean
# told: mean of the ranks' shares
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        x = x.clone()
        dist.all_reduce(x, group=tp.group)
        return x / tp.size

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def row_linear(x, weight, bias, tp):
    y = Reduce.apply(F.linear(x, weight), tp)
    return y if bias is None else y + bias


# %% wrong: needs a bias
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def row_linear(x, weight, bias, tp):
    return reduce_from_region(F.linear(x, weight), tp) + bias


# %% wrong: no gradient
# told: y is right, the gradients are not
import torch
import torch.distributed as dist
import torch.nn.functional as F


def row_linear(x, weight, bias, tp):
    with torch.no_grad():
        y = F.linear(x, weight)
        dist.all_reduce(y, group=tp.group)
    return (y if bias is None else y + bias) + 0 * F.linear(x, weight)


# %% wrong: weights gradient summed
# told: dW is summed over ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(x, copy_to_region(weight, tp)), tp)
    return y if bias is None else y + bias
