from labkit.answers import Edit, Same

_GLOO = "gloo takes views, too; NCCL would not"
_MEAN = "This is the mean over ranks: parts are summed, and nothing is divided."
_DEALT = "Tokens are dealt out one by one: rank r has the r-th block of consecutive tokens."
_SHAPE = ("A gradient has another shape than what the forward pass got: after a gather it is cut again, "
          "after a reduce-scatter it is whole again.")
_SUM = "    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)\n    return out"
_FORWARD, _ALL = "return reduce_scatter(x, tp)", "return all_gather(grad, ctx.tp), None"
_PARTS, _OWN = "reduce_scatter(grad, tp) if ctx.parts", "grad.chunk(tp.size)[tp.rank], None, None"
_BACK = f"return {_PARTS} else {_OWN}"

WRONG = [
    Edit(_FORWARD, "return x.chunk(tp.size)[tp.rank].clone()",
         mistake="Each rank keeps its tokens of its own tensor: what a row layer leaves is a part, to be summed over "
                 "ranks."),
    Edit(_BACK, "return grad.chunk(tp.size)[tp.rank].contiguous(), None, None",
         mistake="Every rank used the gathered tokens for other work: their gradients must be summed, then cut; yours "
                 "are only cut."),
    Edit(_ALL, "return torch.cat([grad if r == ctx.tp.rank else 0 * grad for r in range(ctx.tp.size)]), None",
         mistake="Each rank's tokens are a sum over all ranks' inputs, so every rank needs the gradient of every "
                 "token; yours has only its own."),
    Edit(_ALL, "return torch.cat([grad] * ctx.tp.size), None",
         mistake="You repeat this rank's gradient for the tokens of other ranks: their gradient is on these ranks."),
    Edit(_SUM, _SUM + " / tp.size", mistake=_MEAN),
    Edit(_FORWARD, _FORWARD + " / tp.size", mistake=_MEAN),
    Edit(_PARTS, "reduce_scatter(grad, tp) / tp.size if ctx.parts", mistake=_MEAN),
    Edit(_BACK, "return reduce_scatter(grad, tp), None, None",
         mistake="Where all ranks do the same, each has the whole gradient of a token: your sum is t times it."),
    Edit(_BACK, f"return {_PARTS} else reduce_scatter(grad, tp) / tp.size, None, None",
         told="nothing need travel back"),
    Edit("if ctx.parts", "if not ctx.parts",
         mistake="The two gradients have changed places: with True each rank has a part of them, with False all."),
    Edit(_OWN, "grad, None, None", mistake=_SHAPE),
    Edit(_ALL, "return all_gather(grad, ctx.tp) / ctx.tp.size, None",
         mistake="The backward pass of a sum divides nothing: each rank's input counts once in it."),
    Edit(_FORWARD, "return reduce_scatter(torch.cat([x[r :: tp.size] for r in range(tp.size)]), tp)", mistake=_DEALT),
    Edit("return all_gather(x, tp)",
         "return all_gather(x, tp).unflatten(0, (tp.size, -1)).transpose(0, 1).flatten(0, 1)",
         mistake=_DEALT),
    Edit("return all_gather(x, tp)", "return torch.cat(all_gather(x, tp).chunk(tp.size), 1)", told="got a tensor"),
    Edit(_BACK, "return grad, None, None", mistake=_SHAPE),
    Edit(_BACK, _BACK.removesuffix(", None"), told="one value for each input"),
    Edit(_SUM,
         "    x = x.clone()\n    dist.all_reduce(x, group=tp.group)\n    return x.chunk(tp.size)[tp.rank].contiguous()",
         told="send less"),
]

RIGHT = [
    # an all-to-all and a sum, which sends as much as a reduce-scatter
    Edit("dist.reduce_scatter_tensor", "dist.all_to_all_single", ("x.shape[0] // tp.size, *x.shape[1:]", "x.shape"),
         ("    return out\n\n\ndef gather_sequence",
         "    return out.unflatten(0, (tp.size, -1)).sum(0)\n\n\ndef gather_sequence")),
]

EQUIVALENT = [
    Same("line 30: `.contiguous()` dropped", _GLOO),
    Same("line 35: rounded up for down", "it divides without rest, and 8.0 is as good as 8"),
    Same("line 36: `.contiguous()` dropped", _GLOO),
]


# %% right: the package's own pair
from minimegatron.comm.collectives import gather_from_sequence_region, reduce_scatter_to_sequence_region
def gather_sequence(x, tp, parts=True): return gather_from_sequence_region(x, tp, reduce_gradient=parts)
def reduce_scatter_sequence(x, tp): return reduce_scatter_to_sequence_region(x, tp)


# %% right: one function, which is told both ways
import torch
from minimegatron.comm import collectives as c
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp, there, back):
        ctx.tp, ctx.back = tp, back
        return there(x, tp)
    @staticmethod
    def backward(ctx, g):
        return ctx.back(g, ctx.tp), None, None, None
def own(x, tp): return c.local_part(x, tp, 0)
def gather_sequence(x, tp, tensor_parallel_output_grad=True):
    return Both.apply(x, tp, c.all_gather, c.reduce_scatter if tensor_parallel_output_grad else own)
def reduce_scatter_sequence(x, tp): return Both.apply(x, tp, c.reduce_scatter, c.all_gather)


# %% right: torch.distributed.nn
import torch
import torch.distributed.nn.functional as dnn
def gather_sequence(x, tp, tensor_parallel_output_grad=True):
    if tensor_parallel_output_grad:
        return torch.cat(dnn.all_gather(x.contiguous(), group=tp.group))
    each = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    torch.distributed.all_gather(each, x.detach().contiguous(), group=tp.group)
    return torch.cat([x if r == tp.rank else other for r, other in enumerate(each)])
def reduce_scatter_sequence(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    return dnn.reduce_scatter(out, [part.contiguous() for part in x.chunk(tp.size)], group=tp.group)
