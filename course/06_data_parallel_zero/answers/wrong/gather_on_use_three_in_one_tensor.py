# told: whole weights of 3 units are still alive
from collections.abc import Callable

import torch
import torch.distributed as dist


def forward_backward(
    shards: list[torch.Tensor], forward: Callable, backward: Callable, x: torch.Tensor, gradient_of: Callable,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y and the shards of the gradients, in the order of the units."""
    ranks, last = dist.get_world_size(group), len(shards) - 1
    out, longest = [None] * len(shards), max(map(len, shards)) * ranks
    turns = shards[0].new_empty(3, longest)

    def start(i):
        whole = turns[i % 3, : len(shards[i]) * ranks]
        work = dist.all_gather_into_tensor(whole.view(ranks, -1), shards[i].view(1, -1), group=group, async_op=True)
        return whole, work

    coming = start(0)
    for i in range(last + 1):
        whole, work = coming
        work.wait()
        if i < last:
            coming = start(i + 1)
        x = forward(i, whole, x)
        if i < last:
            del whole, work
    y = x
    dy = gradient_of(y)
    flying = None
    for i in range(last, -1, -1):
        if i < last:
            whole, work = coming
            work.wait()
        coming = start(i - 1) if i else None
        dy, gradient = backward(i, whole, dy)
        del whole
        if flying is not None:
            flying[1].wait()
        out[i] = torch.empty_like(shards[i])
        flying = gradient, dist.reduce_scatter_tensor(out[i], gradient, group=group, async_op=True)
        del gradient
    flying[1].wait()
    return y, out
