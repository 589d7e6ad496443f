# token by token, into zeros
import torch
import torch.distributed as dist


def column_backward(dy, x, weight, tp):
    dw = torch.zeros_like(weight)
    flat_dy, flat_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]).clone()
    dx = torch.einsum("sbo,oi->sbi", dy, weight).contiguous()
    handle = dist.all_reduce(dx, group=tp.group, async_op=True)
    for a, b in zip(flat_dy, flat_x):
        dw.addr_(a, b)
    handle.wait()
    return dx, dw
