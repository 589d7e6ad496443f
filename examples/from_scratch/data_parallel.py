"""Data parallelism from nothing: each rank has the model and a part of the batch; gradients are summed while they come.

    torchrun --standalone --nproc-per-node 2 data_parallel.py

Rank r counts T_r tokens of its own. The loss of the batch is the mean over all T = sum T_r tokens, so a rank begins its
backward pass with the *sum* of its losses, the gradients are summed over ranks, and one division by T comes last.
Averaging the means of ranks would be wrong wherever their T_r differ.

A hook starts the all-reduce of a parameter's gradient as soon as that gradient is there, so the messages of the last
layers travel while the first layers' gradients are computed.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, LENGTH = 50, 32, 24


def model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, VOCAB))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one rank and the labels behind them; -100 marks those that do not count, more on later ranks."""
    tokens = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1 + rank))
    labels = tokens[:, 1:].clone()
    labels[:, : 5 + 3 * rank] = -100
    return tokens[:, :-1], labels


def loss_sum(net: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="sum")


def parallel_gradients(net: nn.Module, rank: int) -> None:
    """Leave in p.grad what one process would have for the batches of all ranks."""
    works = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
    tokens, labels = batch(rank)
    count = (labels != -100).sum()
    works.append(dist.all_reduce(count, async_op=True))
    loss_sum(net, tokens, labels).backward()
    for work in works:
        work.wait()
    for p in net.parameters():
        p.grad /= count


def main() -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    ours = model()
    twin = copy.deepcopy(ours)  # one process with all batches
    parallel_gradients(ours, rank)
    tokens, labels = (torch.cat(parts) for parts in zip(*(batch(r) for r in range(world)), strict=True))
    (loss_sum(twin, tokens, labels) / (labels != -100).sum()).backward()
    pairs = zip(ours.parameters(), twin.parameters(), strict=True)
    return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: gradients are one process's to {main():.0e}")
    dist.barrier()
    dist.destroy_process_group()
