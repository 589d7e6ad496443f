"""Tensor parallelism from nothing: every rank has all tokens, and a part of each matrix (Megatron-LM, 2019).

    torchrun --standalone --nproc-per-node 2 tensor_parallel.py

    x -- f -- attention: whole heads -- rows of the projection -- g -- + -- f -- MLP: columns -- rows -- g -- +

A matrix cut by its outputs needs no message, and one cut by its inputs right behind it gives each rank a share of the
sum. f passes x on, and sums its gradient over ranks; g sums the shares, and passes the gradient on. So a layer has two
all-reduces in each direction. What every rank has whole (norms, the bias behind g) has the same gradient everywhere.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

HIDDEN, HEADS, FFN, LENGTH = 32, 4, 64, 16
SHAPES = {"norm1": (HIDDEN,), "qkv": (3, HIDDEN, HIDDEN), "proj": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
SHAPES |= {"norm2": (HIDDEN,), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
CUT = {"qkv": 1, "proj": 1, "up": 0, "down": 1}  # parameter -> the dim that is cut


class CopyToRegion(torch.autograd.Function):  # f
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromRegion(torch.autograd.Function):  # g
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def layer(p: dict[str, torch.Tensor], x: torch.Tensor, ranks: int, f, g) -> torch.Tensor:
    """[s, h] -> [s, h]; p has this rank's part of each matrix, and HEADS / ranks heads."""
    y = f(F.rms_norm(x, (HIDDEN,), p["norm1"]))
    q, k, v = torch.einsum("soh,nh->son", y[:, None], p["qkv"].flatten(0, 1)).view(len(x), 3, -1).unbind(1)
    q, k, v = (t.view(len(x), HEADS // ranks, -1).transpose(0, 1) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = x + g(y @ p["proj"].T) + p["bias"]  # the bias once, behind the sum
    y = f(F.rms_norm(x, (HIDDEN,), p["norm2"]))
    return x + g(F.gelu(y @ p["up"].T) @ p["down"].T)


def main() -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = {name: (1 + torch.randn(shape) / 5).requires_grad_() for name, shape in SHAPES.items()}
    whole |= {name: (torch.randn(SHAPES[name]) / 6).requires_grad_() for name in CUT}
    x, wanted = torch.randn(LENGTH, HIDDEN), torch.randn(LENGTH, HIDDEN)
    (layer(whole, x, 1, lambda t: t, lambda t: t) * wanted).sum().backward()

    def mine(name: str, t: torch.Tensor) -> torch.Tensor:
        return t.chunk(ranks, CUT[name])[rank] if name in CUT else t

    part = {name: mine(name, t.detach()).clone().requires_grad_() for name, t in whole.items()}
    (layer(part, x, ranks, CopyToRegion.apply, ReduceFromRegion.apply) * wanted).sum().backward()
    return max(
        ((p.grad - mine(n, whole[n].grad)).abs().max() / whole[n].grad.abs().max()).item() for n, p in part.items()
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients are one process's to {main():.0e}")
    dist.barrier()
    dist.destroy_process_group()
