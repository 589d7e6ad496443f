"""Experts with data parallelism from nothing: groups of ranks share the experts, and each group has other tokens.

    torchrun --standalone --nproc-per-node 4 expert_data_parallel.py

Four ranks, experts over two:

    rank               0         1         2         3
    experts            0 to 3    4 to 7    0 to 3    4 to 7
    tokens travel      0 <-> 1             2 <-> 3                the groups of expert parallelism
    experts' sums      0 <-> 2, 1 <-> 3                           ranks with the same experts
    the router's sum   all four

So a model with experts has two data-parallel groups. An expert's gradient is already the sum over the ranks of its
expert-parallel group, since their tokens came to it: it is summed over the *other* axis alone. Both are divided by the
number of all tokens once, at the end. To average experts over their two ranks, and the router over its four, is the
classic mistake: experts then learn twice as fast, and no loss shows why.
"""

import torch
import torch.distributed as dist
from expert_parallel import EXPERTS, FFN, HIDDEN, moe, tokens_of

SHARING = 2  # ranks that share the experts


def groups(rank: int, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group that shares the experts, and the one that has the same experts. All ranks make all groups."""
    grid = torch.arange(ranks).view(-1, SHARING)
    sharing = [dist.new_group(row.tolist()) for row in grid]
    same = [dist.new_group(column.tolist()) for column in grid.T]
    return sharing[rank // SHARING], same[rank % SHARING]


def main() -> float:
    rank, ranks, g = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    sharing, same = groups(rank, ranks)
    shapes = {"router": (EXPERTS, HIDDEN), "up": (EXPERTS, FFN, HIDDEN), "down": (EXPERTS, HIDDEN, FFN)}
    whole = {name: (torch.randn(shape, generator=g) / 6).requires_grad_() for name, shape in shapes.items()}
    every = torch.cat([tokens_of(r) for r in range(ranks)])
    ((moe(every, whole, 1) ** 2).sum() / len(every)).backward()

    def mine(name: str, t: torch.Tensor) -> torch.Tensor:
        return t if name == "router" else t.chunk(SHARING)[rank % SHARING]

    part = {name: mine(name, t.detach()).clone().requires_grad_() for name, t in whole.items()}
    x = tokens_of(rank)
    (moe(x, part, SHARING, sharing) ** 2).sum().backward()
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    for name, p in part.items():
        dist.all_reduce(p.grad, group=None if name == "router" else same)
        p.grad /= count
    pairs = [(p.grad, mine(name, whole[name].grad)) for name, p in part.items()]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients are one process's to {main():.0e}")
    dist.barrier()
    dist.destroy_process_group()
