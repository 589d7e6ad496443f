from labkit.answers import Edit, Same

_GLOO = "gloo takes views, too; NCCL would not"
_DIVIDES = "it divides without rest, and 8.0 is as good as 8"

WRONG = [
    Edit(
        "return reduce_scatter(grad, ctx.tp), None",
        "return grad.chunk(ctx.tp.size)[ctx.tp.rank].contiguous(), None",
        mistake="Every rank used the gathered tokens for other work: their gradients must be summed, then cut; " "yours are only cut.",
    ),
    Edit(
        "        return all_gather(grad, ctx.tp), None",
        """        out = grad.new_zeros(grad.shape[0] * ctx.tp.size, *grad.shape[1:])
        out.chunk(ctx.tp.size)[ctx.tp.rank].copy_(grad)
        return out, None""",
        mistake="Each rank's tokens are a sum over all ranks' inputs, so every rank needs the gradient of every " "token; yours has only its own.",
    ),
    Edit(
        """    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out""",
        """    x = x.clone()
    dist.all_reduce(x, group=tp.group)
    return x.chunk(tp.size)[tp.rank].contiguous()""",
        told="twice as much",
    ),
]

EQUIVALENT = [
    Same("line 29: `.contiguous()` dropped", _GLOO),
    Same("line 34: rounded up for down", _DIVIDES),
    Same("line 35: `.contiguous()` dropped", _GLOO),
]


# %% right: the package's own pair
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
def gather_sequence(x, tp): return gather_from_sequence_region(x, tp)
def reduce_scatter_sequence(x, tp): return reduce_scatter_to_sequence_region(x, tp)


# %% right: one function, with a switch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimegatron.comm.collectives import *
from minimegatron.comm import collectives as c
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp, gather):
        ctx.tp, ctx.gather = tp, gather
        return Both.go(x, tp, gather)
    @staticmethod
    def backward(ctx, g):
        return Both.go(g, ctx.tp, not ctx.gather), None, None
    @staticmethod
    def go(x, tp, gather):
        return c.all_gather(x, tp) if gather else c.reduce_scatter(x, tp)
def gather_sequence(x, tp): return Both.apply(x, tp, True)
def reduce_scatter_sequence(x, tp): return Both.apply(x, tp, False)


# %% right: torch.distributed.nn
import torch
import torch.distributed.nn.functional as dnn


def gather_sequence(x, tp):
    return torch.cat(dnn.all_gather(x.contiguous(), group=tp.group))


def reduce_scatter_sequence(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    return dnn.reduce_scatter(out, [part.contiguous() for part in x.chunk(tp.size)], group=tp.group)


# %% right: an all-to-all and a sum, which sends as much as a reduce-scatter
import torch
import torch.distributed as dist


def all_gather(x, tp):
    out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def reduce_scatter(x, tp):
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=tp.group)
    return parts.unflatten(0, (tp.size, -1)).sum(0)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.tp), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.tp), None


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


# %% wrong: dealt tokens
# mistake: Tokens are dealt out to the ranks one by one; rank r has the r-th block of consecutive tokens.
import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return ag(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return rs(grad, ctx.tp), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        z = torch.cat([x[i :: tp.size] for i in range(tp.size)])
        return rs(z, tp)

    @staticmethod
    def backward(ctx, grad):
        return ag(grad, ctx.tp), None


def ag(x, tp):
    out = x.new_empty(tp.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def rs(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


# %% wrong: mean of the ranks
# mistake: This is the mean of the gradients of all ranks: each rank's work counts once, so they are summed.
import torch
import torch.distributed as dist


def all_gather(x, tp):
    out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def reduce_scatter(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out / tp.size


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.tp), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.tp), None


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


# %% wrong: rs backward repeats own
# mistake: You repeat this rank's gradient for the tokens of other ranks: their gradient is on these ranks.
import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return ag(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return rs(grad, ctx.tp), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return rs(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad] * ctx.tp.size), None


def ag(x, tp):
    out = x.new_empty(tp.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def rs(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


# %% wrong: rs forward scatters only
# mistake: Each rank keeps its tokens of its own tensor: what a row layer leaves is a part, to be summed over ranks.
import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return ag(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return rs(grad, ctx.tp), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.chunk(tp.size)[tp.rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return ag(grad, ctx.tp), None


def ag(x, tp):
    out = x.new_empty(tp.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def rs(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


# %% wrong: along the batch
# told: a tensor
import torch
import torch.distributed as dist


def all_gather(x, tp):
    parts = [torch.empty_like(x.contiguous()) for _ in range(tp.size)]
    dist.all_gather(parts, x.contiguous(), group=tp.group)
    return torch.cat(parts, 1)


def reduce_scatter(x, tp):
    parts = [part.contiguous() for part in x.tensor_split(tp.size, 1)]
    out = torch.empty_like(parts[tp.rank])
    dist.reduce_scatter(out, parts, group=tp.group)
    return out


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.tp), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, ctx.tp), None


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


# %% wrong: gather backward passes
# told: another shape
import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return ag(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return rs(x, tp)

    @staticmethod
    def backward(ctx, grad):
        return ag(grad, ctx.tp), None


def ag(x, tp):
    out = x.new_empty(tp.size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def rs(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out


def gather_sequence(x, tp):
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x, tp):
    return ReduceScatterSequence.apply(x, tp)


