# told: in place | changes
import torch
import torch.distributed as dist
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x.detach())
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)
