# told: once too often
# torch's own all-reduce with a gradient sums in its backward, too
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return dnn.all_reduce(x.contiguous())
