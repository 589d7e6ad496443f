from labkit.answers import Edit

_START, _WAIT = "    handle = dist.all_reduce(dx, group=tp.group, async_op=True)\n", "    handle.wait()\n"
_DW = "    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)\n"

WRONG = [
    Edit(_START, "", (_WAIT, ""),
         mistake="dx is still this rank's share: the sum over ranks was not made, or has not arrived."),
    Edit("all_reduce(dx,", "all_reduce(dx.clone(),",
         mistake="dx is still this rank's share: the sum over ranks was not made, or has not arrived."),
    Edit(_WAIT, _WAIT + "    dist.all_reduce(dw, group=tp.group)\n",
         mistake="dW is summed over ranks, too: each rank's dW belongs to its own rows and is complete."),
    Edit(_START + _DW, _DW + _START.replace("dx", "dw"),
         mistake="The sum was made of dW. It belongs to this rank's rows; dx is what the ranks have shares of."),
    Edit("    dx =", "    dy = dy.clone()\n    dist.all_reduce(dy, group=tp.group)\n    dx =", (_START, ""), (_WAIT,
         ""),
         mistake="You summed dy. It belongs to other features on each rank; what is summed are the products dy W."),
    Edit("return dx,", "return dx / tp.size,",
         mistake="This is the mean of the ranks' shares of dx: x has the sum of them as its gradient."),
    Edit("return dx, dw", "return dx, dw.t()", mistake="dW is transposed: it has the shape of the weight, [out, in]."),
    Edit("dy.flatten(0, 1).t()", "dy.transpose(0, 1).flatten(0, 1).t()",
         mistake="dW pairs dy of one token with x of another: flatten both in the same order."),
    Edit(_DW + _WAIT, _WAIT + _DW, told="waits for the all-reduce before it computes dW"),
    Edit("handle = ", "", (", async_op=True", ""), (_WAIT, ""), told="waits for the all-reduce before it computes dW"),
    Edit(_START + _DW, _DW + _START, told="computes dW before the all-reduce of dx has started"),
    Edit(_WAIT, "", told="never waits for its all_reduce"),
    # one half of the product while dx travels, another product, only copies
    Edit("(0, 1).t() @ x", "(0, 1).t()[:, :1] @ x", ("x.flatten(0, 1)\n", "x.flatten(0, 1)[:1]\n"),
         (_WAIT, _WAIT + "    dw += dy.flatten(0, 1).t()[:, 1:] @ x.flatten(0, 1)[1:]\n"),
         told="before it computes dW"),
    Edit(_DW, "    torch.zeros(64, 64) @ torch.zeros(64, 64)\n", (_WAIT, _WAIT + _DW), told="before it computes dW"),
    Edit(_DW, "    a, b = dy.flatten(0, 1).t().clone(), x.flatten(0, 1).clone()\n", ("dx, dw", "dx, a @ b"),
         told="before it computes dW"),
    Edit(_WAIT, _WAIT + "    dist.all_reduce(dw.clone(), group=tp.group)\n", told="2 times, expected 1"),
    Edit("dx, group=tp.group", "dx"),
]

RIGHT = [
    Edit(_DW, '    dw = torch.einsum("sbo,sbi->oi", dy, x)\n', ("handle.wait()", "handle.get_future().wait()")),
]


# %% right: the package's all_reduce_start, and einsum
import torch
from minimegatron.comm import collectives as c
def column_backward(dy, x, weight, tp):
    sum_of = c.all_reduce_start((dy @ weight).contiguous(), tp)
    dw = torch.einsum('sbo,sbi->oi', dy, x)
    return sum_of.wait(), dw


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
