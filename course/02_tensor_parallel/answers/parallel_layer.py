from labkit.answers import Edit

_NORM = "F.layer_norm(x, x.shape[-1:], *norm)"
_F = f"copy_to_region({_NORM}, tp)"
_SUM = "x + reduce_from_region(part, tp) + proj[1] + fc2[1]"
_FIRST, _SECOND = "F.linear(heads(F.linear(whole, *qkv)), proj[0])", "F.linear(F.gelu(F.linear(whole, *fc1)), fc2[0])"
_TWICE = "A branch is behind two f: the sum of one completes its gradient, the sum of the other counts it t times."
_INSIDE = "The biases of the row layers are added before the sum, on every rank: each counts t times."

WRONG = [
    Edit(_F, _NORM, mistake="f is missing: each rank's gradient of the norm's output is only the share of its own heads "
                            "and features."),
    Edit(_F, "F.layer_norm(copy_to_region(x, tp), x.shape[-1:], *norm)",
         mistake="dx is right, the norm's gradients are not: behind your f the norm works on gradients that are only "
                 "this rank's share."),
    Edit(_F, "F.layer_norm(x, x.shape[-1:], *norm)", ("    whole", "    x = copy_to_region(x, tp)\n    whole"),
         mistake="You put x itself behind f. The norm works on shares then, and the gradient of the residual is summed "
                 "over ranks."),
    Edit("F.linear(whole, *qkv)", "F.linear(copy_to_region(whole, tp), *qkv)", mistake=_TWICE),
    Edit("F.linear(whole, *fc1)", "F.linear(copy_to_region(whole, tp), *fc1)", mistake=_TWICE),
    Edit("reduce_from_region(part, tp)", "part",
         mistake="y is only the share of this rank's heads and features."),
    Edit("reduce_from_region(part, tp)", "copy_to_region(reduce_from_region(part, tp), tp)",
         mistake="The gradient of y is summed on its way back: it is the same on every rank already."),
    Edit(_SUM, "reduce_from_region(x + part, tp) + proj[1] + fc2[1]",
         mistake="x is added before the sum, on every rank: the residual counts t times."),
    Edit(_SUM, "reduce_from_region(x / tp.size + part, tp) + proj[1] + fc2[1]",
         mistake="y is right, dx is not: of the residual x it has only a t-th."),
    Edit("proj[0])", "*proj)", ("fc2[0])", "*fc2)"), (" + proj[1] + fc2[1]", ""), mistake=_INSIDE),
    Edit(_SUM, "x + reduce_from_region(part + (proj[1] + fc2[1]) / tp.size, tp)",
         mistake="y is right, the gradients of the row layers' biases are not: inside the sum each is only a t-th."),
    Edit(" + fc2[1]", "", mistake="A bias is missing: both row layers have one."),
    Edit("x + reduce", "reduce", mistake="x is missing: the layer adds its two branches to it."),
    Edit("x + reduce_from_region", "whole + reduce_from_region",
         mistake="You add the branches to the norm of x: the residual is x itself."),
    Edit("F.linear(whole, *fc1)", f"F.linear(F.layer_norm(x + {_FIRST}, x.shape[-1:], *norm), *fc1)",
         mistake="Your MLP reads what attention left: here both read the norm of x."),
    Edit("F.gelu(F.linear(whole, *fc1))", "F.linear(whole, *fc1)", mistake="The GELU of the MLP is missing."),
    Edit("F.gelu(", "F.gelu(approximate='tanh', input="),
    # right numbers, and a sum too many
    Edit(f"part = {_FIRST} + {_SECOND}", f"part = reduce_from_region({_FIRST}, tp) + reduce_from_region({_SECOND}, tp)",
         ("reduce_from_region(part, tp)", "part"), told="3 times, expected 2"),
    Edit("F.linear(whole, *fc1)", f"F.linear({_F}, *fc1)", told="3 times, expected 2"),
    # each gradient of the norm summed by itself
    Edit(_F, "copy_to_region(F.layer_norm(x, x.shape[-1:]), tp) * copy_to_region(norm[0], tp) + copy_to_region(norm[1], tp)",
         told="4 times, expected 2"),
]

RIGHT = [
    Edit(_SUM, "x + (reduce_from_region(part, tp) + (proj[1] + fc2[1]))"),
]


# %% right: the products that read the norm joined, and those that are summed
import torch
import torch.nn.functional as F
from minimegatron.comm.collectives import copy_to_region, reduce_from_region
def parallel_layer(x, norm, qkv, proj, fc1, fc2, heads, tp):
    n = len(qkv[0])
    z = copy_to_region(torch.nn.functional.layer_norm(x, (x.shape[-1],), norm[0], norm[1]), tp)
    both = F.linear(z, torch.cat([qkv[0], fc1[0]]), torch.cat([qkv[1], fc1[1]]))
    inner = torch.cat([heads(both[..., :n]), F.gelu(both[..., n:])], -1)
    y = reduce_from_region(F.linear(inner, torch.cat([proj[0], fc2[0]], 1)), tp)
    return x + (y + (proj[1] + fc2[1]))


# %% right: a hook for f, a sum by hand for g
import torch.distributed as dist
import torch.nn.functional as F
def parallel_layer(x, norm, qkv, proj, fc1, fc2, heads, tp):
    z = F.layer_norm(x, x.shape[-1:], *norm)
    def summed(grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=tp.group)
        return grad
    z.register_hook(summed)
    part = heads(F.linear(z, *qkv)) @ proj[0].t() + F.gelu(F.linear(z, *fc1)) @ fc2[0].t()
    total = part.detach().clone()
    dist.all_reduce(total, group=tp.group)
    return x + proj[1] + fc2[1] + part + (total - part.detach())


# %% right: one row layer of both, behind one f
import torch
import torch.nn.functional as F
from exercises.row_linear import row_linear
from minimegatron.comm.collectives import copy_to_region
def parallel_layer(x, norm, qkv, proj, fc1, fc2, heads, tp):
    z = copy_to_region(F.layer_norm(x, x.shape[-1:], *norm), tp)
    inner = torch.cat([heads(F.linear(z, *qkv)), F.gelu(F.linear(z, *fc1))], -1)
    return x + row_linear(inner, torch.cat([proj[0], fc2[0]], dim=1), proj[1] + fc2[1], tp)


# %% wrong: the layers of before, one after the other
# told: 4 times, expected 2
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear
def parallel_layer(x, norm, qkv, proj, fc1, fc2, heads, tp):
    z = F.layer_norm(x, x.shape[-1:], *norm)
    attention = row_linear(heads(column_linear(z, *qkv, tp)), *proj, tp)
    return x + attention + row_linear(F.gelu(column_linear(z, *fc1, tp)), *fc2, tp)


# %% wrong: a row of both branches, two columns
# told: 3 times, expected 2
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear
def parallel_layer(x, norm, qkv, proj, fc1, fc2, heads, tp):
    z = F.layer_norm(x, x.shape[-1:], *norm)
    inner = torch.cat([heads(column_linear(z, *qkv, tp)), F.gelu(column_linear(z, *fc1, tp))], -1)
    return x + row_linear(inner, torch.cat([proj[0], fc2[0]], dim=1), proj[1] + fc2[1], tp)
