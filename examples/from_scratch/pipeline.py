"""Pipeline parallelism from nothing: each rank has some layers, and microbatches pass through them (1F1B).

    torchrun --standalone --nproc-per-node 4 pipeline.py

Rank r of p runs p - 1 - r forward passes, then one forward and one backward pass in turn, then the backward passes that
are left: so it never holds more than p - r microbatches, where "all forward, then all backward" holds all m of them.
Of m + p - 1 slots each rank waits in p - 1.

A stage's input is a leaf, whose gradient the stage before waits for. Two ranks may send to each other: no send waits.
"""

import torch
import torch.distributed as dist
from torch import nn

HIDDEN, ROWS, MICROBATCHES = 16, 4, 6


def stage(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100)
    return torch.randn(MICROBATCHES, ROWS, HIDDEN, generator=g), torch.rand(MICROBATCHES, ROWS, 1, generator=g)


def schedule(rank: int, stages: int, microbatches: int) -> list[str]:
    """The passes of a rank in their order: "F" and "B"; microbatch i is the i-th of each."""
    warmup = min(stages - 1 - rank, microbatches)
    return ["F"] * warmup + ["F", "B"] * (microbatches - warmup) + ["B"] * warmup


def run(net: nn.Module, rank: int, stages: int) -> int:
    """Forward and backward of all microbatches; returns the most that were held at once."""
    x, weight = data()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    sends, forwards, most = [], 0, 0
    for what in schedule(rank, stages, MICROBATCHES):
        if what == "F":
            inputs = x[forwards].clone() if rank == 0 else torch.empty(ROWS, HIDDEN)
            if rank > 0:
                dist.recv(inputs, rank - 1)
            outputs = net(inputs.requires_grad_())
            if rank < stages - 1:
                sends.append((dist.isend(outputs.detach(), rank + 1), outputs))
            else:
                outputs = (weight[forwards] * outputs**2).sum()
            held.append((inputs, outputs))
            forwards, most = forwards + 1, max(most, len(held))
        else:
            inputs, outputs = held.pop(0)
            grad = torch.empty(ROWS, HIDDEN) if rank < stages - 1 else None
            if grad is not None:
                dist.recv(grad, rank + 1)
            outputs.backward(grad)
            if rank > 0:
                sends.append((dist.isend(inputs.grad, rank - 1), inputs))
    for work, _ in sends:  # a tensor lives until it has been sent
        work.wait()
    return most


def main() -> float:
    rank, stages = dist.get_rank(), dist.get_world_size()
    ours = stage(rank)
    assert run(ours, rank, stages) == min(stages - rank, MICROBATCHES)
    nets = [stage(r) for r in range(stages)]
    x, weight = data()
    (weight * nn.Sequential(*nets)(x) ** 2).sum().backward()
    pairs = zip(ours.parameters(), nets[rank].parameters(), strict=True)
    return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients are one process's to {main():.0e}")
    dist.barrier()
    dist.destroy_process_group()
