# told: 
import torch
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dx = dy @ weight
    handle = dist.all_reduce(dx, group=tp.group, async_op=True)
    dw = dy[:1].flatten(0, 1).t() @ x[:1].flatten(0, 1)
    handle.wait()
    dw += dy[1:].flatten(0, 1).t() @ x[1:].flatten(0, 1)
    return dx, dw
