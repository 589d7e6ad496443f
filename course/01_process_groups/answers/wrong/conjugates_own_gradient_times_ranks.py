# told: other gradients
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * dist.get_world_size()
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)
