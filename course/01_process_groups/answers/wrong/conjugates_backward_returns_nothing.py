# told: No gradient comes back
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total
    @staticmethod
    def backward(ctx, grad):
        return None
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)
