# functional collectives inside the autograd functions
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
def add(x):
    return fc.wait_tensor(fc.all_reduce(x.contiguous(), "sum", dist.group.WORLD))
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()
    @staticmethod
    def setup_context(ctx, inputs, output):
        pass
    @staticmethod
    def backward(ctx, grad):
        return add(grad)
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add(x)
    @staticmethod
    def backward(ctx, grad):
        return grad.clone()
copy_to, reduce_from = Copy.apply, Reduce.apply
