# told: tokens of its own tensor
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
