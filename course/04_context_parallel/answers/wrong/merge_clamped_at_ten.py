# told: 
import torch


def merge(out, lse, more, more_lse):
    lse, more_lse = lse.clamp(max=80.0), more_lse.clamp(max=80.0)
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    return torch.exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)[..., None] * more, total
