from labkit.answers import Edit

WRONG = [
    Edit("copy_to_region(x, tp)", "x", mistake="dx is only this rank's share: x went into other work on every rank, so the shares must be " "summed."),
    Edit(
        "F.linear(copy_to_region(x, tp), weight, bias)",
        "copy_to_region(F.linear(copy_to_region(x, tp), weight, bias), tp)",
        told="Do not gather",
    ),
]


# %% right: a product and an addition in place of F.linear
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_linear(x, weight, bias, tp):
    y = copy_to_region(x, tp) @ weight.t()
    return y if bias is None else y + bias


# %% right: an autograd function of its own for f
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None
def column_linear(x, weight, bias, tp):
    return F.linear(Sum.apply(x, tp.group), weight, bias)


# %% right: a hook on the gradient for f
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_linear(x, weight, bias, tp):
    x = x.view_as(x)
    def add(g):
        g = g.clone()
        dist.all_reduce(g, group=tp.group)
        return g
    x.register_hook(add)
    return F.linear(x, weight, bias)


# %% right: a hook on x's copy; einsum; the name imported
import torch
from torch.distributed import all_reduce


def column_linear(x, weight, bias, tp):
    x = x * 1.0

    def summed(grad):
        grad = grad.contiguous().clone()
        all_reduce(grad, group=tp.group)
        return grad

    x.register_hook(summed)
    y = torch.einsum("sbi,oi->sbo", x, weight)
    return y if bias is None else y + bias


# %% wrong: bias shared out
# mistake: The bias is divided by t: it belongs to this rank's features, and no other rank has them.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x, weight, bias, tp):
    y = F.linear(copy_to_region(x, tp), weight)
    return y if bias is None else y + bias / tp.size


# %% wrong: f behind the product
# mistake: The sum came behind the product, on the gradient of y: f belongs before the product.
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region


def column_linear(x, weight, bias, tp):
    return copy_to_region(F.linear(x, weight, bias), tp)


# %% wrong: f on the weight
# mistake: dW is summed over ranks, too: it belongs to this rank's features and is complete.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x, weight, bias, tp):
    return F.linear(copy_to_region(x, tp), copy_to_region(weight, tp), bias)


# %% wrong: forgets the bias gradient
# mistake: Only the bias's gradient is wrong or missing: is your bias the one that autograd knows?
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region


def column_linear(x, weight, bias, tp):
    return F.linear(copy_to_region(x, tp), weight, None if bias is None else bias.detach())


# %% wrong: g in place of f
# mistake: You added the ranks' results. They are other features, to be kept apart; what must be added is dx.
import torch.nn.functional as F
from minimegatron.comm.collectives import reduce_from_region


def column_linear(x, weight, bias, tp):
    return reduce_from_region(F.linear(x, weight, bias), tp)


# %% wrong: g on input
# mistake: You summed x over ranks: it is the same on all of them, so the sum is t times x.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x, weight, bias, tp):
    return F.linear(reduce_from_region(x, tp), weight, bias)


# %% wrong: gathers its output
# mistake: You gathered y: a column layer leaves each rank its own features.
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_linear(x, weight, bias, tp):
    return gather_from_region(F.linear(copy_to_region(x, tp), weight, bias), tp)


# %% wrong: hook on x
# mistake: You hook x itself. x is used beside the layer, too, and what comes back from there is now summed as well.
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x, weight, bias, tp):
    if x.requires_grad:

        def summed(grad):
            grad = grad.clone()
            dist.all_reduce(grad, group=tp.group)
            return grad

        x.register_hook(summed)
    return F.linear(x, weight, bias)


# %% wrong: mean of shares
# mistake: This is the mean of the ranks' shares of dx: x went into the work of all of them, so they are summed.
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.tp.group)
        return grad / ctx.tp.size, None


def column_linear(x, weight, bias, tp):
    return F.linear(Copy.apply(x, tp), weight, bias)
# %% wrong: adds the bias in place to x
import torch
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region


def column_linear(x, weight, bias, tp):
    y = F.linear(copy_to_region(x, tp), weight, bias)
    with torch.no_grad():
        weight.mul_(1.5)
    return y


# %% wrong: math of the lesson
# told: stored as [out, in]
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x, weight, bias, tp):
    y = copy_to_region(x, tp) @ weight
    return y if bias is None else y + bias


