from labkit.answers import Edit, Same

_DENSE = "a clone of a transpose is dense, and an all-reduce takes dense memory"

WRONG = [
    Edit("        dist.all_reduce(grad)\n", "", mistake="copy_to must sum in its backward, and wait for the sum: each rank holds only the gradient " "through its own work."),
    Edit(
        """    def backward(ctx, grad):
        return grad""",
        """    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad""",
        mistake="A gradient is summed once too often: behind an all-reduce it is the same on every rank already.",
    ),
    Edit(
        """y = x.contiguous().clone()
        dist.all_reduce(y)
        return y""",
        "return x * 1",
        mistake="A gradient is summed once too often: behind an all-reduce it is the same on every rank already.",
    ),
    # gradient in place
    Edit(
        "grad = grad.contiguous().clone()",
        "grad = grad.contiguous()",
        (
            """def copy_to(x):
    return Copy.apply(x)


def reduce_from(x):
    return Reduce.apply(x)""",
            """def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)""",
        ),
        mistake="You sum the gradient in place. It belongs to autograd, which may hand the same tensor to other " "functions.",
    ),
    # sum on rank 0 only
    Edit(
        "dist.all_reduce(grad)",
        "dist.reduce(grad, 0)",
        (
            """def copy_to(x):
    return Copy.apply(x)


def reduce_from(x):
    return Reduce.apply(x)""",
            """def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)""",
        ),
        told="every rank",
    ),
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


# %% right: torch.distributed.nn, whose own backward is never asked
import torch
import torch.distributed.nn.functional as dnn
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return dnn.all_reduce(grad.clone(memory_format=torch.contiguous_format))
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return dnn.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: backward averages what is complete
# mistake: reduce_from sends nothing in its backward: each rank's gradient is complete.
import torch
import torch.distributed as dist
def total(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return total(grad)
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)
    @staticmethod
    def backward(ctx, grad):
        return total(grad) / dist.get_world_size()
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: backward returns nothing
# mistake: No gradient comes back. A backward that sends nothing still returns the gradient.
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, grad):
        return None
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: f and g swapped
# mistake: You have f and g swapped: one of them communicates in the pass in which the other should.
import torch
import torch.distributed as dist


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.contiguous().clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def copy_to(x):
    return Copy.apply(x)


def reduce_from(x):
    return Reduce.apply(x)


# %% wrong: g divides the gradient
# mistake: reduce_from divides the gradient by the number of ranks. Each rank has the whole gradient of y, and its product is one term of the sum.
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, grad):
        return grad / dist.get_world_size()
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: mean
# mistake: This is the mean of the gradients. A sum does not divide.
import torch
import torch.distributed as dist
def total(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return total(grad) / dist.get_world_size()
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: own gradient times ranks
# mistake: You multiply each rank's own gradient by the number of ranks. The other ranks have other gradients.
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * dist.get_world_size()
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: f broadcasts x
# told: copy_to sends nothing forward
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.contiguous().clone()
        dist.broadcast(y, 0)
        return y
    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)


# %% wrong: of the package
# told: `minimegatron.comm.collectives` is closed in this exercise
from minimegatron.comm.collectives import copy_to_region, reduce_from_region


