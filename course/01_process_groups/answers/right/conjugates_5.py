# torch.distributed.nn, whose own backward is never asked
import torch
import torch.distributed.nn.functional as dnn
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return dnn.all_reduce(grad.clone(memory_format=torch.contiguous_format))
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return dnn.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)
