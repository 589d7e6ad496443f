from labkit.answers import Edit

_F = "copy_to_region(x, tp)"
_ADDED = "You added the ranks' results. They are other features, to be kept apart; what must be added is dx."
_HOOK = """
    def summed(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=tp.group)
        return grad
    x.register_hook(summed)
    return F.linear(x, """

WRONG = [
    Edit(_F, "x",
         mistake="dx is only this rank's share: x went into other work on every rank, so the shares must be summed."),
    Edit("F.linear(copy_to_region(x, tp), weight, bias)", "copy_to_region(F.linear(x, weight, bias), tp)",
         mistake="The sum came behind the product, on the gradient of y: f belongs before the product."),
    Edit("F.linear(copy_to_region(x, tp), weight, bias)",
         "copy_to_region(F.linear(copy_to_region(x, tp), weight, bias), tp)",
         mistake="Two sums backward: that of dx, and one of the gradient of y, which is complete on each rank."),
    Edit("F.linear(copy_to_region(x, tp), weight, bias)", "reduce_from_region(F.linear(x, weight, bias), tp)",
         mistake=_ADDED),
    Edit("F.linear(copy_to_region(x, tp), weight, bias)",
         "reduce_from_region(F.linear(copy_to_region(x, tp), weight, bias), tp)", mistake=_ADDED),
    Edit(_F, "reduce_from_region(x, tp)",
         mistake="You summed x over ranks: it is the same on all of them, so the sum is t times x."),
    Edit("reduce_from_region\n", "reduce_from_region, gather_from_region\n", ("return ", "y = "), ("bias)\n",
         "bias)\n    return gather_from_region(y, tp)\n"),
         mistake="You gathered y: a column layer leaves each rank its own features."),
    Edit(", weight,", ", copy_to_region(weight, tp),",
         mistake="dW is summed over ranks, too: it belongs to this rank's features and is complete."),
    Edit(", bias)", ", bias if bias is None else copy_to_region(bias, tp))",
         mistake="The bias's gradient is summed over ranks, too: it belongs to this rank's features and is complete."),
    Edit(", bias)", ", None)", mistake="The bias is not added."),
    Edit(", bias)", ", bias if bias is None else bias / tp.size)",
         mistake="The bias is divided by t: it belongs to this rank's features, and no other rank has them."),
    Edit(", bias)", ", bias if bias is None else bias.detach())",
         mistake="Only the bias's gradient is wrong or missing: is your bias the one that autograd knows?"),
    Edit(_F, "copy_to_region(x / tp.size + (x - x / tp.size).detach(), tp)",
         mistake="This is the mean of the ranks' shares of dx: x went into the work of all of them, so they are "
                 "summed."),
    Edit("import torch\n", "import torch\nimport torch.distributed as dist\n",
         ("\n    return F.linear(copy_to_region(x, tp), ", _HOOK),
         mistake="You hook x itself. x is used beside the layer, too, and what comes back from there is now summed as "
                 "well."),
    Edit("F.linear(copy_to_region(x, tp), weight, bias)", "copy_to_region(x, tp) @ weight", told="stored as [out, in]"),
    Edit("    return", "    weight.data.mul_(1.5)\n    return", told="it changes its input `weight`"),
]


# %% right: a product and an addition in place of F.linear
from minimegatron.comm.collectives import copy_to_region
def column_linear(x, weight, bias, tp):
    y = copy_to_region(x, tp) @ weight.t()
    return y if bias is None else y + bias


# %% right: an autograd function of its own for f
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
