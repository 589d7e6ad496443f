from labkit.answers import Edit

WRONG = [
    Edit(
        """    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    handle.wait()
""",
        """    handle.wait()
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
""",
        told="Four steps in this order",
    ),
    Edit(
        "handle = dist.all_reduce(dx, group=tp.group, async_op=True)",
        "dist.all_reduce(dx, group=tp.group)",
        ("    handle.wait()\n", ""),
        told="Four steps in this order",
    ),
    Edit(
        """    dx = dy @ weight
    handle""",
        """    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    dx = dy @ weight
    handle""",
        (
            """async_op=True)
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
""",
            "async_op=True)\n",
        ),
        told="Four steps in this order",
    ),
    Edit(
        "    handle = dist.all_reduce(dx, group=tp.group, async_op=True)\n",
        "",
        ("    handle.wait()\n", ""),
        mistake="dx is still this rank's share: the sum over ranks was not made, or has not arrived.",
    ),
    Edit(
        "    handle.wait()\n",
        """    handle.wait()
    dist.all_reduce(dw, group=tp.group)
""",
        mistake="dW is summed over ranks, too: each rank's dW belongs to its own rows and is complete.",
    ),
    # it never waits; the sum may or may not have arrived
    Edit(
        "    handle.wait()\n",
        """    import time
    time.sleep(0.3)
""",
        mistake="dx is still this rank's share: the sum over ranks was not made, or has not arrived.",
    ),
    # a fake product while it waits
    Edit("dw = dy.flatten", "dy.flatten", ("return dx, dw", "return dx, dy.flatten(0, 1).t() @ x.flatten(0, 1)")),
    # another product while it waits
    Edit(
        "dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)",
        "torch.zeros(weight.shape[0], 64) @ torch.zeros(64, weight.shape[1])",
        (
            "handle.wait()",
            """handle.wait()
    dw = torch.einsum("sbo,sbi->oi", dy, x)""",
        ),
    ),
    # copies and a fake product
    Edit(
        "dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)",
        """a, b = dy.flatten(0, 1).t().clone(), x.flatten(0, 1).clone()
    a @ b""",
        ("return dx, dw", "return dx, a @ b"),
    ),
    # copies and multiplies later
    Edit(
        "dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)",
        "a, b = dy.flatten(0, 1).t().clone(), x.flatten(0, 1).clone()",
        ("return dx, dw", "return dx, a @ b"),
    ),
    # ignores the group
    Edit("group=tp.group, async_op", "async_op"),
    # one half while it travels
    Edit(
        "dy.flatten(0, 1).t() @ x",
        "dy[:1].flatten(0, 1).t() @ x[:1]",
        (
            "handle.wait()",
            """handle.wait()
    dw += dy[1:].flatten(0, 1).t() @ x[1:].flatten(0, 1)""",
        ),
    ),
    # sends dw too
    Edit(
        "dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)",
        """dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    again = dist.all_reduce(dw.clone(), group=tp.group, async_op=True)""",
        (
            "handle.wait()",
            """handle.wait()
    again.wait()""",
        ),
    ),
]

RIGHT = [
    # waits through the future
    Edit(
        """dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    handle.wait()""",
        """dw = torch.einsum("sbo,sbi->oi", dy, x)
    handle.get_future().wait()""",
    ),
]


# %% right: the package's all_reduce_start, and einsum
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_backward(dy, x, weight, tp):
    sum_of = c.all_reduce_start((dy @ weight).contiguous(), tp)
    dw = torch.einsum('sbo,sbi->oi', dy, x)
    return sum_of.wait(), dw


# %% right: the wait stands in a finally
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def column_backward(dy, x, weight, tp):
    rows, n = dy.reshape(-1, dy.shape[-1]), x.shape[-1]
    dx = rows.mm(weight).view(x.shape)
    work = dist.all_reduce(dx, group=tp.group, async_op=True)
    try:
        dw = rows.t().mm(x.reshape(-1, n))
    finally:
        work.wait()
    return dx, dw


# %% right: a functional collective, waited for by its first use
import torch
import torch.distributed._functional_collectives as funcol


def column_backward(dy, x, weight, tp):
    dx = funcol.all_reduce((dy @ weight).contiguous(), "sum", tp.group)
    dw = torch.tensordot(dy, x, dims=([0, 1], [0, 1]))
    return dx, dw


# %% right: autograd computes both, one after the other
import torch
import torch.distributed as dist
import torch.nn.functional as F


def column_backward(dy, x, weight, tp):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        y = F.linear(x, weight)
    [dx] = torch.autograd.grad(y, x, dy, retain_graph=True)
    dx = dx.contiguous()
    handle = dist.all_reduce(dx, group=tp.group, async_op=True)
    [dw] = torch.autograd.grad(y, weight, dy)
    handle.wait()
    return dx, dw


# %% wrong: dw transposed
# mistake: dW is transposed: it has the shape of the weight, [out, in].
import torch
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dx = (dy @ weight).contiguous()
    work = dist.all_reduce(dx, group=tp.group, async_op=True)
    dw = torch.einsum("sbo,sbi->io", dy, x)
    work.wait()
    return dx, dw


# %% wrong: dw view of dy transposed
# mistake: dW pairs dy of one token with x of another: flatten both in the same order.
import torch
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dx = (dy @ weight).contiguous()
    work = dist.all_reduce(dx, group=tp.group, async_op=True)
    dw = dy.transpose(0, 1).reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    work.wait()
    return dx, dw


# %% wrong: mean of the ranks
# mistake: This is the mean of the ranks' shares of dx: x has the sum of them as its gradient.
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dx = dy @ weight
    handle = dist.all_reduce(dx, group=tp.group, async_op=True)
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    handle.wait()
    return dx / tp.size, dw


# %% wrong: sums dw not dx
# mistake: The sum was made of dW. It belongs to this rank's rows; dx is what the ranks have shares of.
import torch
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dw = torch.einsum("sbo,sbi->oi", dy, x)
    work = dist.all_reduce(dw, group=tp.group, async_op=True)
    dx = dy @ weight
    work.wait()
    return dx, dw


# %% wrong: before it starts and a fake product
import torch
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    dx = dy @ weight
    handle = dist.all_reduce(dx, group=tp.group, async_op=True)
    dy.flatten(0, 1).t() @ x.flatten(0, 1)
    handle.wait()
    return dx, dw


