"""Expert parallelism from nothing: each rank has some experts, and tokens travel to theirs and back (all-to-all).

    torchrun --standalone --nproc-per-node 2 expert_parallel.py

    choices sorted by expert -> counts to every rank -> rows to the ranks of their experts -> experts -> the way back

How many rows a rank gets is data, so the counts travel first. What an all-to-all does to rows, the reverse one does to
their gradients. Every rank has tokens of its own, another number of them, and a copy of the router, whose gradient is
summed over ranks. An expert's gradient is whole without a sum: it has seen its tokens of all ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

HIDDEN, FFN, EXPERTS, TOP_K = 32, 48, 8, 2


class AllToAll(torch.autograd.Function):
    """Rows to ranks: `out` and `into` say how many go to each, and come from each."""

    @staticmethod
    def forward(ctx, rows, out, into, group):
        ctx.splits = (out, into, group)
        came = rows.new_empty(sum(into), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), into, out, group)
        return came

    @staticmethod
    def backward(ctx, grad):
        out, into, group = ctx.splits
        back = grad.new_empty(sum(out), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), out, into, group)
        return back, None, None, None


def moe(x: torch.Tensor, p: dict[str, torch.Tensor], ranks: int, group: dist.ProcessGroup | None = None):
    """[T, h] -> [T, h]; p["up"] and p["down"] are the E / ranks experts of this rank of the group."""
    weights, experts = (x @ p["router"].T).softmax(-1).topk(TOP_K, dim=-1)
    order = experts.flatten().argsort(stable=True)
    tokens, sent = order // TOP_K, torch.bincount(experts.flatten(), minlength=EXPERTS)
    rows = x[tokens]
    local = EXPERTS // ranks
    came = torch.empty_like(sent)  # [source, my expert]
    dist.all_to_all_single(came, sent, group=group) if ranks > 1 else came.copy_(sent)
    out, into = (n.view(ranks, local).sum(1).tolist() for n in (sent, came))
    rows = AllToAll.apply(rows, out, into, group) if ranks > 1 else rows
    mine = torch.arange(local).repeat(ranks).repeat_interleave(came)  # the expert of each row that came
    by_expert = mine.argsort(stable=True)
    blocks = rows[by_expert].split(torch.bincount(mine, minlength=local).tolist())
    made = torch.cat([F.gelu(b @ up.T) @ down.T for b, up, down in zip(blocks, p["up"], p["down"], strict=True)])
    made = made[by_expert.argsort()]  # as they came
    made = AllToAll.apply(made, into, out, group) if ranks > 1 else made
    return torch.zeros_like(x).index_add(0, tokens, made * weights.flatten()[order, None])


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(20 + 9 * rank, HIDDEN, generator=torch.Generator().manual_seed(1 + rank))


def main() -> float:
    rank, ranks, g = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    shapes = {"router": (EXPERTS, HIDDEN), "up": (EXPERTS, FFN, HIDDEN), "down": (EXPERTS, HIDDEN, FFN)}
    whole = {name: (torch.randn(shape, generator=g) / 6).requires_grad_() for name, shape in shapes.items()}
    (moe(torch.cat([tokens_of(r) for r in range(ranks)]), whole, 1) ** 2).sum().backward()
    part = {n: t.detach() if n == "router" else t.detach().chunk(ranks)[rank] for n, t in whole.items()}
    part = {name: t.clone().requires_grad_() for name, t in part.items()}
    (moe(tokens_of(rank), part, ranks) ** 2).sum().backward()
    dist.all_reduce(part["router"].grad)
    want = {n: t.grad if n == "router" else t.grad.chunk(ranks)[rank] for n, t in whole.items()}
    return max(((part[n].grad - t).abs().max() / t.abs().max()).item() for n, t in want.items())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients are one process's to {main():.0e}")
    dist.barrier()
    dist.destroy_process_group()
