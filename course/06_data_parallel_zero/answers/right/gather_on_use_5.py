import torch
import torch.distributed as dist


def coming(shards, order, group):
    """(unit, its whole weights) one after the other, the next on its way."""
    ranks, following = dist.get_world_size(group), None
    for here, after in zip([None, *order], [*order, None]):
        if here is not None:
            whole, handle = following
            handle.wait()
        if after is not None:
            buffer = shards[after].new_empty(ranks * len(shards[after]))
            following = buffer, dist.all_gather_into_tensor(buffer, shards[after], group=group, async_op=True)
            del buffer
        if here is not None:
            yield here, whole


def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    """A generator gathers; the last unit twice."""
    units = range(len(shards))
    dy, gradients, leaving = None, [torch.empty_like(shard) for shard in shards], None
    for step, (i, whole) in enumerate(coming(shards, [*units, *reversed(units)], group)):
        if step < len(units):
            x = forward(i, whole, x)
            continue
        dy, gradient = backward(i, whole, gradient_of(x) if dy is None else dy)
        if leaving:
            leaving[0].wait()
        leaving = dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient
    leaving[0].wait()
    return x, gradients
