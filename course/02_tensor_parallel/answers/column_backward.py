from labkit.answers import Edit, Same

_GATHER = "    arriving = dist.all_gather_into_tensor(whole, x.contiguous(), group=tp.group, async_op=True)\n"
_DX = "    partial = dy @ weight\n"
_ARRIVE = "    arriving.wait()\n"
_SCATTER = "    leaving = dist.reduce_scatter_tensor(dx, partial, group=tp.group, async_op=True)\n"
_DW = "    dw = dy.flatten(0, 1).t() @ whole.flatten(0, 1)\n"
_LEAVE = "    leaving.wait()\n"

WRONG = [
    Edit(_SCATTER, "    dx = partial.chunk(tp.size)[tp.rank].contiguous()\n", (_LEAVE, ""),
         mistake="dx is still this rank's share: each rank has the part of dx that its own features give, and the "
         "parts must be summed."),
    Edit(_SCATTER, _SCATTER.replace("partial,", "partial / tp.size,"),
         mistake="This is the mean of the ranks' shares of dx: x has the sum of them as its gradient."),
    Edit("return dx, dw", "return dx, dw.t()", mistake="dW is transposed: it has the shape of the weight, [out, in]."),
    Edit("return dx, dw", "dist.all_reduce(dw, group=tp.group)\n    return dx, dw",
         mistake="dW is summed over ranks, too: each rank's dW belongs to its own rows and is complete."),
    Edit("dy.flatten(0, 1).t()", "dy.transpose(0, 1).flatten(0, 1).t()",
         mistake="dW pairs dy of one token with x of another: flatten both in the same order."),
    Edit(_DW, "    n = x.shape[0]\n    mine = dy[tp.rank * n : (tp.rank + 1) * n]\n"
         "    dw = mine.flatten(0, 1).t() @ x.flatten(0, 1)\n",
         mistake="dW is made of this rank's tokens alone: a rank's features of dy are there for all tokens, and each of "
         "them has a part of dW."),
    # all tokens of dx on every rank
    Edit(_SCATTER, "    dist.all_reduce(partial, group=tp.group)\n    dx = partial\n", (_LEAVE, "")),
    Edit(_SCATTER, "    dist.all_reduce(partial, group=tp.group)\n    dx = partial.chunk(tp.size)[tp.rank].contiguous()\n",
         (_LEAVE, ""), told="calls all_reduce"),
    Edit(_DX + _ARRIVE, _ARRIVE + _DX, told="done while x travels"),
    Edit(_DW + _LEAVE, _LEAVE + _DW, told="done while dx travels"),
    Edit(_SCATTER + _DW, _DW + _SCATTER, told="done while dx travels"),
    # dW first: then dx cannot hide what comes after it
    Edit(_DX + _ARRIVE + _SCATTER + _DW, _ARRIVE + _DW + _DX + _SCATTER, told="done while x travels"),
    Edit("arriving = ", "", ("whole, x.contiguous(), group=tp.group, async_op=True", "whole, x.contiguous(), "
         "group=tp.group"), (_ARRIVE, ""), told="done while x travels"),
    Edit(_LEAVE, "", told="never waits for its reduce_scatter"),
    # one half of the product while dx travels
    Edit("(0, 1).t() @ whole", "(0, 1).t()[:, :1] @ whole", ("whole.flatten(0, 1)\n", "whole.flatten(0, 1)[:1]\n"),
         (_LEAVE, _LEAVE + "    dw += dy.flatten(0, 1).t()[:, 1:] @ whole.flatten(0, 1)[1:]\n"),
         told="done while dx travels"),
    # a message more
    Edit(_LEAVE, _LEAVE + "    dist.all_gather_into_tensor(whole, x.contiguous(), group=tp.group)\n",
         told="3 times, expected 2"),
    Edit(_SCATTER, _SCATTER.replace("group=tp.group, ", "")),
    Edit("x.contiguous(), group=tp.group, ", "x.contiguous(), "),
]

RIGHT = [
    Edit(_DW, '    dw = torch.einsum("sbo,sbi->oi", dy, whole)\n', ("arriving.wait()", "arriving.get_future().wait()")),
]

EQUIVALENT = [Same("line 8: `.contiguous()` dropped", "gloo gathers a view, too")]


# %% right: lists of tensors
import torch
import torch.distributed as dist
def column_backward(dy, x, weight, tp):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    gather = dist.all_gather(parts, x.contiguous(), group=tp.group, async_op=True)
    shares = [part.contiguous() for part in torch.matmul(dy, weight).chunk(tp.size)]
    gather.wait()
    dx = torch.empty_like(shares[0])
    scatter = dist.reduce_scatter(dx, shares, group=tp.group, async_op=True)
    dw = torch.einsum('sbo,sbi->oi', dy, torch.cat(parts))
    scatter.wait()
    return dx, dw


# %% right: functional collectives, waited for by their first use
import torch
import torch.distributed._functional_collectives as funcol
def column_backward(dy, x, weight, tp):
    whole = funcol.all_gather_tensor(x.contiguous(), 0, tp.group)
    share = (dy @ weight).contiguous()
    whole = funcol.wait_tensor(whole)
    dx = funcol.reduce_scatter_tensor(share, "sum", 0, tp.group)
    dw = torch.tensordot(dy, whole, dims=([0, 1], [0, 1]))
    return dx, dw


# %% right: in transposed shapes, the products by bmm
import torch
import torch.distributed as dist
def column_backward(dy, x, weight, tp):
    s, b, i = x.shape
    whole = torch.empty(tp.size * s, b, i, dtype=x.dtype)
    one = dist.all_gather_into_tensor(whole, x.contiguous(), tp.group, True)
    share = torch.bmm(dy, weight.expand(len(dy), -1, -1)).contiguous()
    one.wait()
    dx = torch.empty(s, b, i, dtype=x.dtype)
    two = dist.reduce_scatter_tensor(dx, share, dist.ReduceOp.SUM, tp.group, async_op=True)
    dw = torch.bmm(dy.permute(1, 2, 0), whole.transpose(0, 1)).sum(0)
    two.wait()
    return dx, dw
