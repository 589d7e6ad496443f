# names imported one by one; a reduce-scatter and an all-gather of a flat copy; work handles
import torch
from torch.autograd import Function
from torch.distributed import all_gather_into_tensor, get_world_size, reduce_scatter_tensor
def total(x):
    n = get_world_size()
    size = -(-x.numel() // n)
    flat = torch.zeros(size * n, dtype=x.dtype)
    flat[: x.numel()] = x.reshape(-1)
    part = torch.empty(size, dtype=x.dtype)
    reduce_scatter_tensor(part, flat, async_op=True).wait()
    all_gather_into_tensor(flat, part, async_op=True).wait()
    return flat[: x.numel()].reshape(x.shape)
class Copy(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(x.shape)
    @staticmethod
    def backward(ctx, grad):
        return total(grad)
class Reduce(Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)
    @staticmethod
    def backward(ctx, grad):
        return grad
def copy_to(x): return Copy.apply(x)
def reduce_from(x): return Reduce.apply(x)
