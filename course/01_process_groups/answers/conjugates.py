from labkit.answers import Edit, Same

_DENSE = "a clone of a transpose is dense, and an all-reduce takes dense memory"
_NO_GRADIENT = "No gradient comes back. A backward that sends nothing still returns the gradient."
_COPY = "        grad = grad.contiguous().clone()\n        dist.all_reduce(grad)\n        return grad\n"
_REDUCE = "        y = x.contiguous().clone()\n        dist.all_reduce(y)\n        return y\n"
_BACK = "    def backward(ctx, grad):\n        return grad\n"

WRONG = [
    Edit("return Copy", "return G", ("return Reduce", "return Copy"), ("return G", "return Reduce"),
         mistake="You have f and g swapped: one of them communicates in the pass in which the other should."),
    Edit(_COPY, "        return grad * 1\n",
         mistake="copy_to must sum in its backward, and wait for the sum: each rank holds only the gradient through "
                 "its own work."),
    Edit(_REDUCE, "        return x * 1\n",
         mistake="reduce_from returns each rank's own x. Its forward pass is the sum over ranks."),
    Edit(_BACK, "    def backward(ctx, grad):\n" + _COPY,
         mistake="A gradient is summed once too often: behind an all-reduce it is the same on every rank already."),
    Edit(_BACK, _BACK.replace("grad\n", "None\n"), mistake=_NO_GRADIENT),
    Edit(_COPY, _COPY.replace("return grad", "return None"), mistake=_NO_GRADIENT),
    Edit(_COPY, _COPY.replace("return grad", "return grad / dist.get_world_size()"),
         mistake="This is the mean of the gradients. A sum does not divide."),
    Edit(_BACK, _BACK.replace("return grad", "return grad / dist.get_world_size()"),
         mistake="reduce_from divides the gradient by the number of ranks. Each rank has the whole gradient of y, and "
                 "its product is one term of the sum."),
    Edit("grad.contiguous().clone()", "grad.contiguous()",
         mistake="You sum the gradient in place. It belongs to autograd, which may hand the same tensor to other "
                 "functions."),
    Edit("dist.all_reduce(grad)", "dist.reduce(grad, 0)", told="grad is wrong"),
    Edit("return x.view_as(x)", "y = x.contiguous().clone()\n        dist.broadcast(y, 0)\n        return y",
         told="copy_to sends nothing forward"),
    Edit("import torch\n", "from minimegatron.comm.collectives import copy_to_region\nimport torch\n",
         told="`minimegatron.comm.collectives` is closed in this exercise"),
]

RIGHT = [
    # torch.distributed.nn, whose own backward is never asked
    Edit("import torch.distributed as dist", "import torch.distributed.nn.functional as dnn",
         (_COPY, "        return dnn.all_reduce(grad.clone(memory_format=torch.contiguous_format))\n"),
         (_REDUCE, "        return dnn.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))\n")),
]

EQUIVALENT = [
    Same("line 14: `.contiguous()` dropped", _DENSE),
    Same("line 24: `.contiguous()` dropped", _DENSE),
]


# %% right: one autograd function with a switch; the sum by an all-gather
import torch
import torch.distributed as dist
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, both):
        ctx.both = both
        return F.add(x) if both else x * 1
    @staticmethod
    def backward(ctx, g):
        return (g if ctx.both else F.add(g)), None
    @staticmethod
    def add(x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return sum(parts)
def copy_to(x): return F.apply(x, False)
def reduce_from(x): return F.apply(x, True)


# %% right: no autograd function: a hook on the gradient, and a detached correction
import torch
import torch.distributed as dist
def copy_to(x):
    y = x.view_as(x) if x.requires_grad else x
    def add(g):
        g = g.clone()
        dist.all_reduce(g)
        return g
    y.register_hook(add)
    return y
def reduce_from(x):
    total = x.detach().clone()
    dist.all_reduce(total)
    return x + (total - x.detach())


# %% right: names imported one by one; a reduce-scatter and an all-gather of a flat copy; work handles
import torch
from torch.autograd import Function
from torch.distributed import all_gather_into_tensor, get_world_size, reduce_scatter_tensor
def total(x):
    n = get_world_size()
    size = -(-x.numel() // n)
    flat = torch.zeros(size * n, dtype=x.dtype)
    flat[: x.numel()] = x.reshape(-1)
    part = torch.empty(size, dtype=x.dtype)
    reduce_scatter_tensor(part, flat, async_op=True).wait()
    all_gather_into_tensor(flat, part, async_op=True).wait()
    return flat[: x.numel()].reshape(x.shape)
class Copy(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(x.shape)
    @staticmethod
    def backward(ctx, grad):
        return total(grad)
class Reduce(Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)
