# told: 
import torch
import torch.distributed as dist
import torch.nn.functional as F


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def attention(x, qkv, proj, d, queries_per_group, tp):
    packed = F.linear(Copy.apply(x), *qkv).unflatten(-1, (-1, queries_per_group + 2, d))
    q, k, v = packed.split([queries_per_group, 1, 1], dim=3)
    q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries_per_group > 1)
    return Reduce.apply(F.linear(out.permute(2, 0, 1, 3).flatten(2), proj[0])) + proj[1]
