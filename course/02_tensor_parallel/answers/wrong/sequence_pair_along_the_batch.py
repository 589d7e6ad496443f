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
