# told: gradient of the table is not
import torch
import torch.distributed as dist


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, tp):
        local = ids - tp.rank * weight.shape[0]
        own = (local >= 0) & (local < weight.shape[0])
        ctx.save_for_backward(local[own], own)
        ctx.shape = weight.shape
        rows = weight.new_zeros(*ids.shape, weight.shape[1])
        rows[own] = weight[local[own]]
        dist.all_reduce(rows, group=tp.group)
        return rows

    @staticmethod
    def backward(ctx, dy):
        local, own = ctx.saved_tensors
        dw = dy.new_zeros(ctx.shape)
        dw[local] = dy[own]
        return None, dw, None


def embedding(ids, weight, tp):
    return Lookup.apply(ids, weight, tp)
