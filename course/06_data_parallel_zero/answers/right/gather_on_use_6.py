import torch
import torch.distributed as dist


def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    """Tables of weights and handles, whose entries are let go of when a unit has run."""
    ranks, units = dist.get_world_size(group), len(shards)
    weights, handles, gradients, leaving = {}, {}, {}, {}

    def ask(i):
        if 0 <= i < units and i not in weights:
            weights[i] = shards[i].new_empty(ranks * len(shards[i]))
            handles[i] = dist.all_gather_into_tensor(weights[i], shards[i], group=group, async_op=True)

    ask(0)
    for i in range(units):
        handles.pop(i).wait()
        ask(i + 1)
        x = forward(i, weights[i], x)
        if i + 1 < units:
            weights.pop(i)
    y, dy = x, gradient_of(x)
    for i in range(units)[::-1]:
        if i in handles:
            handles.pop(i).wait()
        ask(i - 1)
        dy, whole = backward(i, weights.pop(i), dy)
        for handle, _ in leaving.values():
            handle.wait()
        gradients[i] = torch.empty_like(shards[i])
        leaving = {i: (dist.reduce_scatter_tensor(gradients[i], whole, group=group, async_op=True), whole)}
    leaving[0][0].wait()
    return y, [gradients[i] for i in range(units)]
