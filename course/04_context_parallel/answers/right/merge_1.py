# the maximum is subtracted by hand
import torch
import torch.distributed as dist
import torch.nn.functional as F
def merge(out, lse, more, more_lse):
    top = torch.maximum(lse, more_lse).nan_to_num(neginf=0.0)
    a, b = (lse - top).exp(), (more_lse - top).exp()
    total = a + b
    safe = torch.where(total > 0, total, 1.0)
    return (out * (a / safe)[..., None] + more * (b / safe)[..., None]), top + total.log()
