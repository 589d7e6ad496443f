from labkit.answers import Edit

_G = "reduce_from_region(F.linear(x, weight), tp)"
_BIAS = "return y if bias is None else y + bias"
_ONE_RANK = "y is right, but only rank 0 adds the bias, so only its bias has a gradient: every rank holds the bias."

WRONG = [
    Edit(_G, "F.linear(x, weight)",
         mistake="This is a partial sum of y, not yet added up: the ranks' shares must be summed forward."),
    Edit("F.linear(x, weight)", "F.linear(x, weight, bias)", (_BIAS, "return y"),
         mistake="Each rank added the bias before the sum: t biases."),
    Edit("F.linear(x, weight)", "F.linear(x, weight, bias if bias is None else bias / tp.size)", (_BIAS, "return y"),
         mistake="Only the bias's gradient is wrong: the bias is added once, after the sum, on every rank."),
    Edit(_BIAS, "return y", mistake="The bias is not added."),
    Edit("F.linear(x, weight)", "F.linear(x, weight, None if tp.rank else bias)", (_BIAS, "return y"), mistake=_ONE_RANK),
    Edit("F.linear(x, weight)", "F.linear(x, weight, bias if bias is None else bias * (tp.rank == 0))",
         (_BIAS, "return y"), mistake=_ONE_RANK),
    Edit(_G, _G + " / tp.size", mistake="This is the mean of the ranks' shares: y is their sum."),
    Edit("F.linear(x, weight)", "copy_to_region(F.linear(x, weight), tp)",
         mistake="Summed once too often: dy is already the same on every rank."),
    Edit("F.linear(x,", "F.linear(copy_to_region(x, tp),",
         mistake="dx is summed over ranks: it belongs to this rank's features of x and is complete."),
    Edit("weight), tp)", "copy_to_region(weight, tp)), tp)",
         mistake="dW is summed over ranks: it belongs to this rank's features of x and is complete."),
    Edit("y + bias", "y + copy_to_region(bias, tp)",
         mistake="The bias's gradient is summed over ranks: dy is the same on all of them, and each adds the bias "
                 "once."),
    Edit(_G, "reduce_from_region(F.linear(x, weight).detach(), tp) + 0 * F.linear(x, weight)",
         mistake="y is right, the gradients are not: look at what comes back through your sum."),
    Edit("reduce_from_region\n", "reduce_from_region, gather_from_region\n", (_G,
         "sum(gather_from_region(F.linear(x, weight), tp).chunk(tp.size, -1))"),
         told="allowed here: all_reduce"),
    # summed over the world
    Edit(_G, "F.linear(x, weight)\n    total = y.detach().clone()\n    torch.distributed.all_reduce(total)\n"
         "    y = y + (total - y.detach())"),
]


# %% right: a product in place of F.linear
from minimegatron.comm.collectives import reduce_from_region
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
