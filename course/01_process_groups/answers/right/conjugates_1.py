# one autograd function with a switch; the sum by an all-gather
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
