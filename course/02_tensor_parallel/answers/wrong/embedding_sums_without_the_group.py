# told: 
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def embedding(ids, weight, tp):
    local = ids - tp.rank * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
    return Reduce.apply(rows)
