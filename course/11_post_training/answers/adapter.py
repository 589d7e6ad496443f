from labkit.answers import Edit

_C = "u = copy_to_region(F.linear(x, a), tp)\n    return scale * F.linear(u, b)"
_R = "u = reduce_from_region(F.linear(x, a), tp)\n    return scale * F.linear(u, b)"
_PLAIN = "return scale * F.linear(F.linear(x, a), b)"
_F_FIRST = "return scale * F.linear(F.linear(copy_to_region(x, tp), a), b)"
_F_LAST = "return copy_to_region(scale * F.linear(F.linear(x, a), b), tp)"
_G_LAST = "return reduce_from_region(scale * F.linear(F.linear(x, a), b), tp)"
_AROUND = "In both layers y is right and a gradient is a share. Column: the sum comes in front of A, so A's is. Row: it comes behind B, so B's is."

WRONG = [
    Edit(_C, "return scale * F.linear(F.linear(x, a), b)",
         mistake="Column: y is right, but the gradient of u is a share on each rank, so those of A and x are shares, too."),
    Edit("copy_to_region(F.linear(x, a), tp)", "F.linear(copy_to_region(x, tp), a)",
         mistake="Column: the sum comes in front of A. So x's gradient is complete, and A's is a share of it on each rank."),
    Edit("copy_to_region(F.linear(x, a), tp)", "copy_to_region(F.linear(copy_to_region(x, tp), a), tp)",
         mistake="Column: summed twice on the way to x. What comes out of the first sum is complete already."),
    Edit("copy_to_region(F.linear(x, a), tp)", "F.linear(copy_to_region(x, tp), copy_to_region(a, tp))",
         told="2 times, expected 1"),
    Edit(_C, "return copy_to_region(scale * F.linear(F.linear(x, a), b), tp)",
         mistake="Column: the sum stands behind B, where each rank has outputs of its own."),
    Edit("copy_to_region(F.linear(x, a), tp)", "reduce_from_region(F.linear(x, a), tp)",
         mistake="Column: u is the same on every rank; its sum is t times u."),
    Edit(_R, "return reduce_from_region(scale * F.linear(F.linear(x, a), b), tp)",
         mistake="Row: y is right, but B has seen a share of u on each rank, so its gradient is a share."),
    Edit(_R, "u = F.linear(x, a)\n    return scale * F.linear(u, b)", mistake="Row: u is a share of the sum over all features, and so is what is added."),
    Edit("reduce_from_region(F.linear(x, a), tp)", "copy_to_region(F.linear(x, a), tp)",
         mistake="Row: the sum must be made forward. Backward it is there already: y's gradient is the same on all ranks."),
    Edit("reduce_from_region(F.linear(x, a), tp)", "copy_to_region(reduce_from_region(F.linear(x, a), tp), tp)",
         mistake="Row: u's gradient is complete on each rank; it is summed once too often."),
    Edit("reduce_from_region(F.linear(x, a), tp)\n    return scale * F.linear(u, b)",
         "reduce_from_region(F.linear(x, a), tp)\n    return scale * F.linear(u, copy_to_region(b, tp))",
         mistake="Row: B's gradient is complete on each rank; it is summed once too often."),
    Edit("return scale * F.linear(u, b)", "return F.linear(u, b)", mistake="What is added is scaled by alpha / r."),
    Edit(_R, _R.replace("scale *", "scale / tp.size *"), mistake="Row: the shares are added up, not averaged."),
    Edit(_C, _PLAIN, (_R, _PLAIN), mistake="In both layers no sum is made. Column: the gradient of u is a share on each rank. Row: u itself is one."),
    Edit(_C, _F_FIRST, (_R, _G_LAST), mistake=_AROUND),
    Edit(_C, _PLAIN, (_R, _G_LAST), mistake="Column: no sum is made, and the gradients of A and x are shares. Row: y is right, but the sum stands behind B, whose gradient is a share."),
    Edit(_C, _F_LAST, (_R, _G_LAST), mistake="In both layers the sum stands behind B. Column: there each rank has outputs of its own. Row: y is right, but B's gradient is a share."),
    Edit(_C, _F_FIRST, (_R, _PLAIN), mistake="Column: the sum comes in front of A, whose gradient is then a share. Row: no sum is made, and what is added is a share."),
    Edit("copy_to_region(F.linear(x, a), tp)", "XX(F.linear(x, a), tp)", ("reduce_from_region(F.linear(x, a), tp)", "copy_to_region(F.linear(x, a), tp)"), ("XX", "reduce_from_region"),
         mistake="f and g are exchanged: beside a column layer u's gradient is summed, beside a row layer u itself."),
]


# %% right: products written out, the scale on u
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_adapter(x, a, b, scale, tp):
    return copy_to_region(scale * (x @ a.t()), tp) @ b.t()


def row_adapter(x, a, b, scale, tp):
    return reduce_from_region(scale * (x @ a.t()), tp) @ b.t()


# %% right: autograd functions of its own
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, group):
        ctx.group = group
        return u.view_as(u)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, group):
        u = u.contiguous().clone()
        dist.all_reduce(u, group=group)
        return u

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def column_adapter(x, a, b, scale, tp):
    return F.linear(Backward.apply(F.linear(x, a), tp.group), b) * scale


def row_adapter(x, a, b, scale, tp):
    return F.linear(Forward.apply(F.linear(x, a), tp.group), b) * scale


# %% right: einsum, a hook on u
import torch
import torch.distributed as dist

from minimegatron.comm.collectives import reduce_from_region


def column_adapter(x, a, b, scale, tp):
    u = torch.einsum("sbi,ri->sbr", x, a)

    def summed(grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=tp.group)
        return grad

    u.register_hook(summed)
    return torch.einsum("sbr,or->sbo", u, scale * b)


def row_adapter(x, a, b, scale, tp):
    u = reduce_from_region(torch.einsum("sbi,ri->sbr", x, a), tp)
    return torch.einsum("sbr,or->sbo", u, scale * b)
