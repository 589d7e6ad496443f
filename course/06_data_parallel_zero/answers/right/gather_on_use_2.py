import torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc
def forward_backward(shards, forward, backward, x, gradient_of, group=None):
    """functional collectives, the last gathered twice"""
    g = group or dist.group.WORLD
    n = len(shards)
    order = list(range(n)) + list(reversed(range(n)))
    nxt = fc.all_gather_tensor(shards[0], 0, g)
    out = [None] * n; prev = None
    for k, i in enumerate(order):
        whole = fc.wait_tensor(nxt)
        nxt = fc.all_gather_tensor(shards[order[k + 1]], 0, g) if k + 1 < 2 * n else None
        if k < n:
            x = forward(i, whole, x)
            if k == n - 1: y, dy = x, gradient_of(x)
        else:
            dy, grad = backward(i, whole, dy)
            if prev is not None: out[prev] = fc.wait_tensor(out[prev])
            out[i] = fc.reduce_scatter_tensor(grad, "sum", 0, g); prev = i
        del whole
    out[prev] = fc.wait_tensor(out[prev])
    return y, out
