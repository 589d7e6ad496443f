# told: 
import torch


def merge(out, lse, more, more_lse):
    if torch.isinf(lse).all():
        return more, more_lse
    total = lse + torch.log1p(torch.exp(more_lse - lse))
    return torch.exp(lse - total)[..., None] * out + torch.exp(more_lse - total)[..., None] * more, total
