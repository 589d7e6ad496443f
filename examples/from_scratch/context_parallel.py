"""Context parallelism from nothing: each rank has a part of the sequence; keys and values travel in a ring.

    torchrun --standalone --nproc-per-node 2 context_parallel.py

The sequence is cut into 2 C chunks; rank r of C has chunks r and 2 C - 1 - r, since late tokens see more keys than
early ones. In step i it attends to the block of rank (r - i) mod C, and merges by the logs of the denominators:

    lse = log(exp(lse1) + exp(lse2))        out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2

Backward the blocks travel again with their gradients, around to their owners: p = exp(q k - lse), ds = p (dout v - D).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

LENGTH, DIM = 32, 16


def places(rank: int, ranks: int) -> torch.Tensor:
    chunks = torch.arange(LENGTH).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def shift(block: torch.Tensor) -> torch.Tensor:  # to the next rank, from the one before
    rank, ranks, came = dist.get_rank(), dist.get_world_size(), torch.empty_like(block)
    works = [dist.isend(block, (rank + 1) % ranks), dist.irecv(came, (rank - 1) % ranks)]
    [work.wait() for work in works]
    return came


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out, lse, block = torch.zeros_like(q), torch.full((len(q), 1), -torch.inf), torch.stack((k, v))
        for step in range(ranks):
            scores = scores_of(q, block[0], rank, (rank - step) % ranks, ranks)
            new = torch.logaddexp(lse, scores.logsumexp(1, keepdim=True))
            out = (lse - new).exp() * out + (scores - new).exp() @ block[1]
            lse, block = new, shift(block) if step < ranks - 1 else block
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dq, block = torch.zeros_like(q), torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
        for step in range(ranks):
            k, v, dk, dv = block
            p = (scores_of(q, k, rank, (rank - step) % ranks, ranks) - lse).exp()
            ds = p * (dout @ v.T - (dout * out).sum(1, keepdim=True)) / DIM**0.5  # D = dout . out
            dq += ds @ k
            block = shift(torch.stack((k, v, dk + ds.T @ q, dv + p.T @ dout)))  # after C steps it is home
        return dq, block[2], block[3]


def scores_of(q: torch.Tensor, k: torch.Tensor, rank: int, owner: int, ranks: int) -> torch.Tensor:
    hidden = places(rank, ranks)[:, None] < places(owner, ranks)
    return (q @ k.T / DIM**0.5).masked_fill(hidden, -torch.inf)


def main() -> float:
    mine = places(dist.get_rank(), dist.get_world_size())
    q, k, v, dout = torch.randn(4, LENGTH, DIM, generator=torch.Generator().manual_seed(0))
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*(t[None] for t in whole), is_causal=True)[0]
    want.backward(dout)
    parts = [t[mine].requires_grad_() for t in (q, k, v)]
    (out := RingAttention.apply(*parts)).backward(dout[mine])
    pairs = [(out, want[mine]), *((part.grad, t.grad[mine]) for part, t in zip(parts, whole, strict=True))]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: output and gradients are one process's to {main():.0e}")
    dist.barrier()
    dist.destroy_process_group()
