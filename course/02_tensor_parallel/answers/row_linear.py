from labkit.answers import Edit

WRONG = [
    Edit(
        "F.linear(x, weight)",
        "F.linear(x, weight, bias)",
        ("return y if bias is None else y + bias", "return y"),
        mistake="Each rank added the bias before the sum: t biases.",
    ),
    Edit("reduce_from_region(F.linear(x, weight), tp)", "F.linear(x, weight)", mistake="This is a partial sum of y, not yet added up."),
    Edit(
        "reduce_from_region(F.linear(x, weight), tp)",
        "reduce_from_region(copy_to_region(F.linear(x, weight), tp), tp)",
        mistake="Summed once too often: dy is already the same on every rank.",
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
# mistake: Only the bias's gradient is wrong: the bias is added once, after the sum, on every rank.
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def row_linear(x, weight, bias, tp):
    return reduce_from_region(F.linear(x, weight, None if bias is None else bias / tp.size), tp)


# %% wrong: bias f
# mistake: The bias's gradient is summed over ranks: dy is the same on all of them, and each adds the bias once.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(x, weight), tp)
    return y if bias is None else y + copy_to_region(bias, tp)


# %% wrong: f and g around it
# mistake: dx is summed over ranks: it belongs to this rank's features of x and is complete.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(copy_to_region(x, tp), weight), tp)
    return y if bias is None else y + bias


# %% wrong: mean
# mistake: This is the mean of the ranks' shares: y is their sum.
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


# %% wrong: no gradient
# mistake: y is right, the gradients are not: look at what comes back through your sum.
import torch
import torch.distributed as dist
import torch.nn.functional as F


def row_linear(x, weight, bias, tp):
    with torch.no_grad():
        y = F.linear(x, weight)
        dist.all_reduce(y, group=tp.group)
    return (y if bias is None else y + bias) + 0 * F.linear(x, weight)


# %% wrong: weights gradient summed
# mistake: dW is summed over ranks: it belongs to this rank's features of x and is complete.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x, weight, bias, tp):
    y = reduce_from_region(F.linear(x, copy_to_region(weight, tp)), tp)
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


