# told: 
import torch


def merge(out, lse, more, more_lse):
    top = torch.maximum(lse, more_lse)
    a, b = torch.exp(lse - top), torch.exp(more_lse - top)
    new = (a[..., None] * out + b[..., None] * more) / (a + b)[..., None]
    return new, top + torch.log(a + b)
